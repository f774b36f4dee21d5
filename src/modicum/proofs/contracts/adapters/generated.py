"""Tensors that an adapter draws from its seed: kept nowhere, and the same wherever it is loaded."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.factors import generated
from modicum.adapters.files import load
from modicum.adapters.native_files import WEIGHTS
from modicum.core.contracts.catalog import of_value
from modicum.core.contracts.state import trained_state
from modicum.proofs.contracts.adapters.subjects import (
    AdapterSubject,
    adapters_check,
    attached,
    llama,
    some_targets,
    stir,
    tokens,
)
from modicum.proofs.contracts.base import NotApplicable


@adapters_check()
def check_generated_tensors_are_kept_by_their_seed(subject: AdapterSubject) -> None:
    """What is drawn from the seed is in no state dict, checkpoint or file; the seed is, once each.

    Loaded under another name, or into an adapter of another seed, it is the same to the bit.
    """
    model, ids = llama(), tokens()
    adapter = stir(_generating(subject, model, seed=5))
    drawn, output = _drawn(adapter), model(ids)
    kept = set(model.state_dict()) | set(trained_state(model)[0]())
    kept |= {adapter.model_name(name) for name in adapter.state_dict()}
    named = [adapter.model_name(name) for name in drawn]
    assert not kept & set(named), f"{named[0]} is kept in a state"
    record = of_value(adapter.method)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "adapter"
        adapter.save(folder, form="modicum")
        assert not load_file(folder / WEIGHTS).keys() & set(drawn), "it is in the adapter's file"
        other = llama()
        twin = load(other, folder, name="other", plugins=() if record.module else (record.file,))
    _assert_same(_drawn(twin), drawn, "loaded under another name")
    assert torch.equal(other(ids), output), "loaded under another name, it computes something else"
    for by_model in (True, False):
        third = llama()
        twin = attached(subject, third, seed=6)
        assert any(not torch.equal(value, _drawn(twin)[name]) for name, value in drawn.items()), (
            "another seed draws the same"
        )
        if by_model:
            third.load_state_dict(model.state_dict())
        else:
            twin.load_state_dict(adapter.state_dict())
        _assert_same(_drawn(twin), drawn, "loaded over another seed")
        assert torch.equal(third(ids), output), "loaded over another seed, outputs are others"


@adapters_check()
def check_generated_tensors_are_a_function_of_seed_and_site(subject: AdapterSubject) -> None:
    """Whatever the other targets, on meta first or not, in fp32 on the CPU and cast afterwards."""
    full = _drawn(_generating(subject, llama(), seed=3))
    some = some_targets(subject)
    for name, value in _drawn(attached(subject, llama(), seed=3, targets=some)).items():
        begin = full[name][tuple(slice(size) for size in value.shape)]
        assert torch.equal(value, begin), f"{name} depends on the other targets"
    model = llama("meta")
    adapter = attached(subject, model, seed=3)
    model.to_empty(device="cpu").initialise(0)
    adapter.initialise()
    _assert_same(_drawn(adapter), full, "made on meta")
    half = llama()
    adapter = attached(subject, half, seed=3)
    half.bfloat16()
    precise = {f"{owner}.{n}" for owner, module in adapter.modules() for n in module.precise_names}
    cast = {
        name: value if name in precise or not value.is_floating_point() else value.bfloat16()
        for name, value in full.items()
    }
    _assert_same(_drawn(adapter), cast, "in bf16")
    half.load_state_dict(half.state_dict())
    _assert_same(_drawn(adapter), cast, "in bf16, loaded")


def _generating(subject: AdapterSubject, model: torch.nn.Module, *, seed: int) -> AttachedAdapter:
    adapter = attached(subject, model, seed=seed)
    method, sites = adapter.method, list(adapter.sites.values())
    if not any(generated(method.frozen(site)) for site in sites) and not generated(
        method.shared_frozen(sites)
    ):
        raise NotApplicable("it draws no frozen tensors from its seed")
    return adapter


def _drawn(adapter: AttachedAdapter) -> dict[str, Tensor]:
    """Copies of what is drawn, by owner and name."""
    return {
        f"{owner}.{name}": module.get_buffer(name).clone()
        for owner, module in adapter.modules()
        for name in module.drawn_names
    }


def _assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], where: str) -> None:
    assert found.keys() == expected.keys(), f"{where}, other tensors are drawn"
    for name, value in expected.items():
        assert torch.equal(found[name], value), f"{where}, {name} is another"
