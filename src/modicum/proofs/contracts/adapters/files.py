"""What of an adapter survives in a state dictionary and in a folder."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from modicum.adapters.files import load
from modicum.adapters.travel import travel_of
from modicum.core.contracts.catalog import of_value
from modicum.core.contracts.travel import travel_form
from modicum.core.errors import InputError
from modicum.models.llama import Llama
from modicum.proofs.contracts.adapters.subjects import (
    REORDERED,
    AdapterSubject,
    adapters_check,
    assert_close,
    attached,
    llama,
    stir,
    tokens,
)
from modicum.proofs.contracts.base import NotApplicable
from modicum.proofs.contracts.small_training import SmallTraining, assert_resumes


@adapters_check()
def check_state_dict_round_trip(subject: AdapterSubject) -> None:
    """Factors read from one model and put into another give the same outputs, to the bit.

    What data decided is the same there.
    """
    model, ids = llama(), tokens()
    adapter = stir(attached(subject, model))
    other = llama()
    twin = adapter.method.attach(other, seed=7, prepared=adapter.prepared)
    state = {name: value.clone() for name, value in adapter.state_dict().items()}
    twin.load_state_dict(state)
    assert torch.equal(model(ids), other(ids)), "the same factors give other outputs"
    name = next(iter(state))
    wrong = [
        {key: value for key, value in state.items() if key != name},
        state | {"nowhere.A": state[name]},
        state | {name: state[name].flatten()[:1]},
    ]
    for broken in wrong:
        try:
            twin.load_state_dict(broken)
        except InputError:
            continue
        raise AssertionError("factors with a wrong name or shape were not refused")


@adapters_check(proves="export")
def check_file_round_trip(subject: AdapterSubject) -> None:
    """Saved for PEFT and loaded, outputs are equal to 2e-6; no exact LoRA is not saved as one.

    Its traits say which of the two it is.
    """
    model, ids = llama(), tokens()
    adapter = stir(attached(subject, model))
    travel, said = travel_of(adapter), travel_form(adapter.method.traits)
    assert travel.form == said, f"its traits say {said!r}, and here it is {travel.form!r}"
    exact = said in ("lora", "peft")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "adapter"
        if not exact:
            try:
                adapter.save(folder, form="peft")
            except InputError:
                raise NotApplicable("it is no plain LoRA, and says so when saved") from None
            raise AssertionError("it was saved as a LoRA that it is not")
        adapter.save(folder, form="peft")
        other = llama()
        load(other, folder)
        # A rewritten weight was rounded once more than the one that it was taken from, too.
        assert_close(other(ids), model(ids), REORDERED, "loaded, it computes something else")


@adapters_check()
def check_own_file_round_trip(subject: AdapterSubject) -> None:
    """In modicum's own format every method can be kept: loaded, outputs are equal to 1e-6."""
    model, ids = llama(), tokens()
    adapter = stir(attached(subject, model, seed=5))
    record = of_value(adapter.method)
    plugins = () if record.module else (record.file,)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "adapter"
        adapter.save(folder, form="modicum")
        other = llama()
        twin = load(other, folder, name="other", plugins=plugins)
        assert_close(other(ids), model(ids), 1e-6, "the loaded adapter computes something else")
        for name, value in adapter.state_dict().items():
            assert torch.equal(twin.state_dict()[name], value), f"{name} is not what was saved"


@adapters_check(needs=("exact_resume",))
def check_resumes_to_the_bit(subject: AdapterSubject) -> None:
    """Stopped after two steps and continued in a new model, training ends in the same bits."""

    def start(seed: int = 0, kept: Mapping[str, Tensor] | None = None) -> SmallTraining:
        model: Llama = llama("meta")
        adapter = attached(subject, model, seed=seed, prepared_seed=0)
        model.to_empty(device="cpu").initialise(0)
        adapter.initialise(kept=kept)
        return SmallTraining(model, _loss)

    assert_resumes(start, lambda saved: start(11, kept=saved["model"]))


def _loss(model: nn.Module, step: int) -> Tensor:
    return model(tokens(length=4 + step)).square().mean()
