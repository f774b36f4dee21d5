"""What of an adapter survives in a state dictionary and in a folder."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from modicum.adapters.base import Adapter
from modicum.adapters.peft_files import load
from modicum.core.errors import InputError
from modicum.core.parameters import optimizer_groups
from modicum.core.state import optimizer_state, trained_state
from modicum.models.llama import Llama
from modicum.proofs.contracts.adapters.subjects import (
    Subject,
    adapters_check,
    assert_close,
    llama,
    small,
    stir,
    tokens,
)
from modicum.proofs.contracts.base import NotApplicable


@adapters_check()
def check_state_dict_round_trip(subject: Subject) -> None:
    """Factors read from one model and put into another give the same outputs, to the bit."""
    model, ids = llama(), tokens()
    adapter = stir(small(subject).attach(model))
    other = llama()
    twin = small(subject).attach(other, seed=7)
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


@adapters_check()
def check_file_round_trip(subject: Subject) -> None:
    """Saved for PEFT and loaded, outputs are equal to 1e-6; no exact LoRA is not saved as one."""
    model, ids = llama(), tokens()
    adapter = stir(small(subject).attach(model))
    exact = all(layer.as_lora() is not None for _, layer in adapter.layers())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "adapter"
        if not exact:
            try:
                adapter.save(folder)
            except InputError:
                raise NotApplicable("it is no plain LoRA, and says so when saved") from None
            raise AssertionError("it was saved as a LoRA that it is not")
        adapter.save(folder)
        other = llama()
        load(other, folder)
        assert_close(other(ids), model(ids), 1e-6, "the loaded adapter computes something else")


@adapters_check()
def check_resumes_to_the_bit(subject: Subject) -> None:
    """Stopped after two steps and continued in a new model, training ends in the same bits."""
    if "exact_resume" not in subject.info.traits:
        raise NotApplicable("the method does not claim `exact_resume`")
    whole = _Training(small(subject))
    whole.steps(0, 4)
    begun = _Training(small(subject))
    begun.steps(0, 2)
    saved = {
        name: {key: value.clone() for key, value in read().items()}
        for name, (read, _) in begun.state.items()
    }
    continued = _Training(small(subject), seed=11)
    for name, (_, put) in continued.state.items():
        put(saved[name])
    continued.steps(2, 4)
    one, other = whole.adapter.state_dict(), continued.adapter.state_dict()
    for name, value in one.items():
        assert torch.equal(value, other[name]), f"{name} differs after the interruption"


class _Training:
    """A few steps of AdamW on the small decoder, and the state that a checkpoint holds."""

    def __init__(self, value: Adapter, seed: int = 0) -> None:
        self.model: Llama = llama()
        self.adapter = value.attach(self.model, seed=seed)
        groups = optimizer_groups(self.model, learning_rate=1e-2, weight_decay=0.1)
        self.optimizer = torch.optim.AdamW(groups)
        self.state = {
            "model": trained_state(self.model),
            "optimizer": optimizer_state(self.optimizer),
        }

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.model(tokens(length=4 + step)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
