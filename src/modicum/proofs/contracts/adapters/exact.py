"""What an adapter computes: its start, and its weight after merging."""

from __future__ import annotations

import warnings

import torch
from torch.autograd.gradcheck import GradcheckError

from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.merging import RoundingWarning
from modicum.core.errors import InputError
from modicum.proofs.contracts.adapters.subjects import (
    AdapterSubject,
    adapters_check,
    assert_close,
    llama,
    numbers,
    odd_model,
    rewrites,
    small,
    stir,
    tokens,
)
from modicum.proofs.contracts.base import NotApplicable


@adapters_check()
def check_starts_as_the_base(subject: AdapterSubject) -> None:
    """A fresh adapter leaves the model's output as it was, to the bit.

    One that rewrites the base weight (a factor taken out of it) may round: 1e-5.
    """
    model, ids = llama(), tokens()
    before = model(ids)
    small(subject).attach(model)
    tolerance = 1e-5 if rewrites(subject) else 0.0
    assert_close(model(ids), before, tolerance, "a fresh adapter changes outputs")


@adapters_check()
def check_merged_equals_unmerged(subject: AdapterSubject) -> None:
    """Folded into the weights, the adapter computes what it computed unmerged, to 1e-5."""
    _must_merge(subject)
    model, ids = llama(), tokens()
    before = model(ids)
    adapter = stir(small(subject).attach(model))
    beside = model(ids)
    assert not torch.equal(before, beside), "moving the factors does not change the output"
    adapter.merge()
    assert_close(model(ids), beside, 1e-5, "the merged model computes something else")
    adapter.unmerge()
    assert_close(model(ids), beside, 1e-5, "the unmerged model computes something else")


@adapters_check()
def check_unmerge_restores_the_weights(subject: AdapterSubject) -> None:
    """Merged and unmerged, a weight is what it was: to 1e-6 in fp32, to the bit in bf16."""
    _must_merge(subject)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 0.0)):
        model = odd_model(dtype)
        adapter = stir(small(subject).attach(model))
        before = _weights(adapter)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RoundingWarning)
            adapter.merge()
        merged = _weights(adapter)
        assert any(not torch.equal(one, two) for one, two in zip(before, merged, strict=True)), (
            f"merging does not change a {dtype} weight"
        )
        adapter.unmerge()
        for now, then in zip(_weights(adapter), before, strict=True):
            assert_close(now, then, tolerance, f"a {dtype} weight is not restored")


@adapters_check()
def check_merging_twice_is_refused(subject: AdapterSubject) -> None:
    """Merging a merged adapter, or unmerging one that is not merged, is an InputError."""
    _must_merge(subject)
    adapter = stir(small(subject).attach(odd_model()))
    for action in (adapter.unmerge, adapter.merge, adapter.merge):
        merged = adapter.merged
        try:
            action()
        except InputError:
            assert action == adapter.unmerge or merged, "the first merge was refused"
        else:
            allowed = action == adapter.merge and not merged
            assert allowed, f"{action.__name__} was not refused"


@adapters_check()
def check_delta_is_the_change_of_the_weight(subject: AdapterSubject) -> None:
    """`delta` is fp32 [out, in], what merging adds to the weight as it was before the adapter came.

    A method that says it is a LoRA has s B A, of its rank.
    """
    model = odd_model()
    adapter = stir(small(subject).attach(model))
    merged = odd_model()
    stir(small(subject).attach(merged)).merge()
    for name, layer in adapter.layers():
        original = odd_model().get_submodule(name).get_parameter("weight")
        change = merged.get_submodule(name).get_parameter("weight") - original
        assert_close(change, layer.delta(), 1e-5, "merging changes the weight by something else")
        site, delta = adapter.sites[name], layer.delta()
        expected = (site.out_features, site.in_features)
        assert delta.dtype == torch.float32, f"delta is {delta.dtype}, it must be float32"
        assert tuple(delta.shape) == expected, f"delta is {tuple(delta.shape)}, not {expected}"
        lora = layer.as_lora()
        if lora is None:
            continue
        a, b, scale = lora
        assert_close(scale * (b @ a), delta, 1e-6, "as_lora is another update than delta")
        rank = int(torch.linalg.matrix_rank(delta.detach(), rtol=1e-4))
        assert rank <= a.shape[0], f"delta has rank {rank}, its factors {a.shape[0]}"


@adapters_check()
def check_inputs_of_any_shape(subject: AdapterSubject) -> None:
    """Inputs of one, two and three dimensions, layers of odd widths, with a bias and without."""
    model = odd_model()
    adapter = stir(small(subject).attach(model))
    shapes = ((7,), (4, 7), (2, 3, 7), (1, 7), (0, 7))
    beside = [model(numbers(*shape)) for shape in shapes]
    adapter.merge()
    for shape, output in zip(shapes, beside, strict=True):
        if output.numel():
            assert_close(model(numbers(*shape)), output, 1e-5, f"with inputs {shape}, merging")
        else:
            assert output.shape == (*shape[:-1], 5), f"inputs {shape} give outputs {output.shape}"


@adapters_check()
def check_gradients_are_those_of_the_function(subject: AdapterSubject) -> None:
    """Analytic gradients of factors and inputs equal numeric ones, in float64."""
    model = odd_model().double()
    adapter = stir(small(subject).attach(model))
    model.double()  # the factors too
    if not list(adapter.parameters()):
        raise NotApplicable("the method trains nothing")
    names = [name for name, value in model.named_parameters() if value.requires_grad]
    inputs = numbers(2, 7, dtype=torch.float64).requires_grad_()

    def output(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        given = dict(zip(names, values, strict=True))
        return torch.func.functional_call(model, given, (x,))

    values = [value for _, value in model.named_parameters() if value.requires_grad]
    try:
        torch.autograd.gradcheck(output, (inputs, *values))
    except GradcheckError as error:
        raise AssertionError(f"a gradient is wrong: {str(error).splitlines()[0]}") from None


def _weights(adapter: AttachedAdapter) -> list[torch.Tensor]:
    """Copies of the base weights under the adapter."""
    bases = (adapter.model.get_submodule(name) for name in adapter.sites)
    return [base.get_parameter("weight").detach().clone() for base in bases]


def _must_merge(subject: AdapterSubject) -> None:
    if "mergeable" not in subject.info.traits:
        raise NotApplicable("the method does not claim `mergeable`")
