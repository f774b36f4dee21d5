"""Adapters that write their own entries of the base: which they change, and that they undo it."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.merging import RoundingWarning
from modicum.adapters.patching_layer import INDICES, PatchingLayer
from modicum.adapters.pissa import PiSSA
from modicum.core.errors import InputError
from modicum.core.layers.linear_forms import linear_form
from modicum.proofs.contracts.adapters.subjects import (
    AdapterSubject,
    adapters_check,
    assert_close,
    attached,
    llama,
    numbers,
    odd_model,
    stir,
    tokens,
)

_DTYPES = (torch.float32, torch.bfloat16)


@adapters_check(needs=("writes_base",))
def check_patches_leave_no_trace(subject: AdapterSubject) -> None:
    """Trained, switched, merged and taken off in any order, the base is what it was, to the bit."""
    for dtype in _DTYPES:
        model, inputs = odd_model(subject, dtype), numbers(4, 7, dtype=dtype)
        base = _bits(model)
        one, two = (stir(attached(subject, model, name=name)) for name in ("one", "two"))
        one.activate()
        model(inputs).square().sum().backward()
        _assert_bits(model, base, "a training step")
        two.activate()
        alone = model(inputs)
        with two.disabled():
            model(inputs)
        one.activate(alone=False)
        model(inputs)
        _assert_bits(model, base, "switching")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RoundingWarning)
            for adapter in (one, two, one):
                adapter.merge()
                adapter.unmerge()
                _assert_bits(model, base, "merging and unmerging")
            two.activate()
            two.merge()
        assert torch.equal(model(inputs), alone), "merged, it computes something else"
        two.unmerge()
        one.detach()
        two.detach()
        _assert_bits(model, base, "detaching")


@adapters_check(needs=("writes_base", "mergeable"))
def check_changes_its_entries_alone(subject: AdapterSubject) -> None:
    """Merged, its own entries are others and all others are the same, to the bit."""
    for dtype in _DTYPES:
        model = odd_model(subject, dtype)
        plain = dict(odd_model(subject, dtype).named_parameters())
        adapter = stir(attached(subject, model), std=2.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RoundingWarning)
            adapter.merge()
        for name, layer in _patches(adapter).items():
            before, after = plain[f"{name}.weight"], layer.layer.get_parameter("weight")
            own = torch.zeros(before.shape, dtype=torch.bool)
            own[layer.places().rows_and_columns()] = True
            found = int(own.sum())
            assert found == layer.values.numel(), f"{found} places, {layer.values.numel()} values"
            moved = before != after
            assert torch.equal(moved, own), f"merging changes other entries of {name} than its own"


@adapters_check(needs=("writes_base",))
def check_gradients_are_the_dense_ones(subject: AdapterSubject) -> None:
    """Its values have the gradients that a trained dense weight has at their places, to 1e-6.

    Two that are trained together have theirs too, where they have an entry both; in fp64.
    """
    model, ids = llama().double(), tokens()
    adapters = [stir(attached(subject, model, name=name)) for name in ("one", "two")]
    adapters[0].activate(alone=False)
    model(ids).square().sum().backward()
    dense, changes = llama().double(), dict[str, Tensor]()
    for adapter in adapters:
        for name, layer in _patches(adapter).items():
            changes[name] = changes.get(name, 0) + layer.delta()
    with torch.no_grad():
        for name, change in changes.items():
            dense.get_submodule(name).get_parameter("weight").add_(change)
    assert_close(model(ids), dense(ids), 1e-6, "patches add up to something else")
    dense(ids).square().sum().backward()
    for adapter in adapters:
        for name, layer in _patches(adapter).items():
            weight, found = dense.get_submodule(name).get_parameter("weight"), layer.values.grad
            assert weight.grad is not None, f"{name} gets no gradient"
            assert found is not None, f"the patch of {name} gets no gradient"
            expected = weight.grad[layer.places().rows_and_columns()]
            assert_close(found, expected, 1e-6, f"the patch of {name} has another gradient")


@adapters_check(needs=("writes_base",))
def check_patches_that_cannot_be_are_refused(subject: AdapterSubject) -> None:
    """Dropout, a base of codes, one that another adapter rewrites, and wrong indices are refused.

    The model, and the adapter that is on it, stay as they were.
    """
    model, inputs = odd_model(subject), numbers(4, 7)
    names = [name for name, _ in model.named_modules()]
    before = model(inputs)
    _refused(lambda: attached(subject, model, dropout=0.1), "dropout")
    coded = nn.Sequential(linear_form("int8").from_dense(numbers(5, 7), None))
    _refused(lambda: attached(subject, coded), "a quantized base")
    other = PiSSA(rank=2).attach(model)
    _refused(lambda: attached(subject, model, name="second"), "a patch of a rewritten weight")
    other.detach()
    assert [name for name, _ in model.named_modules()] == names, "a refused patch is on the model"
    assert_close(model(inputs), before, 1e-5, "a refused patch has changed the model")
    adapter = stir(attached(subject, model))
    _refused(lambda: PiSSA(rank=2).attach(model, name="second"), "rewriting a patched weight")
    output = model(inputs)
    state = {name: value.clone() for name, value in adapter.state_dict().items()}
    kept = [name for name in state if name.endswith(f".{INDICES}")]
    for name in kept:
        indices = state[name]
        for wrong in (indices.flip(0), indices.clamp(max=indices[-2]), indices + 2**20, -indices):
            _refused(lambda n=name, w=wrong: adapter.load_state_dict(state | {n: w}), "indices")
    assert torch.equal(model(inputs), output), "refused indices have changed the adapter"


def _patches(adapter: AttachedAdapter) -> dict[str, PatchingLayer]:
    return {name: layer for name, layer in adapter.layers() if isinstance(layer, PatchingLayer)}


def _bits(model: nn.Module) -> dict[str, Tensor]:
    """Parameters as the integers that they are stored as, where no zero equals another."""
    kinds = {4: torch.int32, 2: torch.int16}
    named = model.named_parameters()
    return {name: p.detach().view(kinds[p.element_size()]).clone() for name, p in named}


def _assert_bits(model: nn.Module, before: dict[str, Tensor], after: str) -> None:
    now = _bits(model)
    for name, value in before.items():
        assert torch.equal(now[name], value), f"after {after}, {name} is not what it was"


def _refused(work: object, what: str) -> None:
    assert callable(work)
    try:
        work()
    except (InputError, RuntimeError):
        return
    raise AssertionError(f"{what} was not refused")
