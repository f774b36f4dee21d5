"""Which layers a compressor takes, and what survives in files and state dictionaries."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

from modicum.compress.base import LayerCompressor
from modicum.compress.compressed_model import CompressedModel
from modicum.compress.loading import load
from modicum.compress.low_rank_base import LowRankCompressor
from modicum.core.errors import InputError
from modicum.core.layers.calibration import Calibration
from modicum.proofs.contracts.base import NotApplicable
from modicum.proofs.contracts.compress.subjects import (
    CompressSubject,
    calibrated,
    compress_check,
    compressed,
    factored,
    llama,
    shapes,
    small,
    tokens,
    wrapped,
)


@compress_check()
def check_targets(subject: CompressSubject) -> None:
    """It takes what `targets` names and `exclude` leaves; head, embeddings and biases stay."""
    if not isinstance(small(subject), LayerCompressor):
        raise NotApplicable("the method has no targets")
    model = llama(attention_bias=True)
    others = {
        name: parameter
        for name, parameter in model.named_parameters()
        if not name.endswith("_proj.weight")
    }
    everything = compressed(small(subject), model)
    assert isinstance(everything, CompressedModel)
    assert len(everything.layers) == 14, f"it takes {len(everything.layers)} of 14 projections"
    now = dict(model.named_parameters())
    changed = [name for name in others if now.get(name) is not others[name]]
    assert not changed, f"{changed[0]} was replaced"
    some = small(subject, targets=("*.mlp.*",), exclude=("up_proj",)).plan(llama()).layers
    assert {name.rsplit(".", 1)[-1] for name in some} == {"gate_proj", "down_proj"}
    for wrong in ({"targets": ("qproj",)}, {"exclude": ("all-linear",)}):
        try:
            small(subject, **wrong).plan(llama())
        except InputError:
            continue
        raise AssertionError(f"{wrong} was not refused")


@compress_check()
def check_layers_that_save_nothing_stay_dense(subject: CompressSubject) -> None:
    """At a rank at which factors are no smaller than the weight, a layer is left alone."""
    if not isinstance(small(subject), LowRankCompressor):
        raise NotApplicable("the method has no rank")
    value = small(subject, rank=6)  # 16 to 8: 144 elements in place of 128
    model = llama()
    handle = compressed(value, model)
    assert isinstance(handle, CompressedModel)
    assert set(factored(model)) == set(handle.layers)
    for name, module in model.named_modules():
        if name.endswith(("k_proj", "v_proj")):
            assert type(module) is nn.Linear, f"{name} has factors that are larger than it was"
        elif name.endswith("_proj"):
            assert handle.plan.of(name).arguments == {"rank": 6}, f"{name} has no factors"
    try:
        small(subject, rank=1000).plan(llama())
    except InputError:
        return
    raise AssertionError("a rank at which nothing becomes smaller was not refused")


@compress_check()
def check_wrapped_without_memory(subject: CompressSubject) -> None:
    """On meta, shapes and names are those of the fitted model, and its factors fit in."""
    handle, ids = compressed(small(subject)), tokens()
    bare = llama("meta")
    wrapped(small(subject), bare, handle)
    expected = shapes(handle.model)
    assert shapes(bare) == expected, "wrapping on meta makes other parameters than fitting"
    planned = small(subject).plan(llama("meta"))
    if "plans_from_weights" in small(subject).traits:
        bound = llama("meta")
        handle_of = small(subject).wrap(bound)
        most = sum(parameter.numel() for parameter in bound.parameters())
        assert handle.plan.layers.keys() <= planned.layers.keys(), "the plan on meta is no bound"
        assert most >= sum(parameter.numel() for parameter in handle.model.parameters())
        assert handle_of.plan == planned
    else:
        assert planned == handle.plan, "the plan on meta is another one"
    assert all(parameter.is_meta for parameter in bare.parameters()), "wrapping takes memory"
    other = llama()
    twin = wrapped(small(subject), other, handle)
    twin.load_state_dict(handle.state_dict())
    assert torch.equal(other(ids), handle.model(ids)), "the same factors give other outputs"
    state = twin.state_dict()
    name = next(iter(state))
    for wrong in ({name: state[name]}, state | {name: state[name].flatten()[:1]}):
        try:
            twin.load_state_dict(wrong)
        except InputError:
            continue
        raise AssertionError("factors with a wrong name or shape were not refused")


@compress_check(proves="export")
def check_file_round_trip(subject: CompressSubject) -> None:
    """Saved and loaded, outputs are the same to the bit, and the file is as small as the model."""
    handle, ids = compressed(small(subject)), tokens()
    with tempfile.TemporaryDirectory() as temporary:
        folder = handle.save(Path(temporary) / "model")
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        other = llama(initializer_range=0.1)
        load(other, folder)
        try:
            load(llama(width=24), folder)
        except InputError:
            refused = True
        else:
            refused = False
    assert torch.equal(other(ids), handle.model(ids)), "the loaded model computes something else"
    weights = sum(p.numel() * p.element_size() for p in handle.model.parameters())
    assert weights <= size <= weights + 16_000, f"the file has {size} bytes, the model {weights}"
    assert refused, "a folder of another model was not refused"


@compress_check()
def check_calibrations_travel(subject: CompressSubject) -> None:
    """A calibration that was saved and loaded gives the same model, at another share too."""
    value, model = small(subject), llama()
    found = calibrated(value, model)
    with tempfile.TemporaryDirectory() as temporary:
        again = Calibration.load(found.save(Path(temporary) / "calibration.safetensors"))
    factors = isinstance(value, LowRankCompressor)
    for fields in ({"share": 0.3, "rank": None}, {"share": 0.6, "rank": None}):
        given = small(subject, **(fields if factors else {}))
        one, other = (given.fit(llama(), each).state_dict() for each in (found, again))
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), f"{name} differs, {fields}"
