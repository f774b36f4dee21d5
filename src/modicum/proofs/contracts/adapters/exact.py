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
    attached,
    llama,
    numbers,
    odd_model,
    start_tolerance,
    stir,
    tokens,
)
from modicum.proofs.contracts.base import NotApplicable


@adapters_check(unless=("starts_elsewhere",))
def check_starts_as_the_base(subject: AdapterSubject) -> None:
    """A fresh adapter leaves the model's output as it was, to the bit.

    One that says `starts_near` may round: 1e-5.
    """
    model, ids = llama(), tokens()
    before = model(ids)
    attached(subject, model)
    assert_close(model(ids), before, start_tolerance(subject), "a fresh adapter changes outputs")


@adapters_check(needs=("starts_elsewhere",))
def check_starts_elsewhere(subject: AdapterSubject) -> None:
    """A fresh adapter changes outputs, the same way each time, and is off when it is switched off.

    Its factors' first values are what a loss's gradient moves from, so outputs are finite.
    """
    model, other, ids = llama(), llama(), tokens()
    before = model(ids)
    adapter = attached(subject, model)
    after = model(ids)
    attached(subject, other)
    assert not torch.equal(after, before), "a fresh adapter leaves outputs as they were"
    assert bool(after.isfinite().all()), "a fresh adapter gives outputs that are not finite"
    assert torch.equal(after, other(ids)), "it starts at another place the second time"
    with adapter.disabled():
        assert torch.equal(model(ids), before), "switched off, it changes outputs"


@adapters_check(needs=("mergeable",))
def check_merged_equals_unmerged(subject: AdapterSubject) -> None:
    """Folded into the weights, the adapter computes what it computed unmerged, to 1e-5."""
    model, ids = llama(), tokens()
    before = model(ids)
    adapter = stir(attached(subject, model))
    beside = model(ids)
    assert not torch.equal(before, beside), "moving the factors does not change the output"
    adapter.merge()
    assert_close(model(ids), beside, 1e-5, "the merged model computes something else")
    adapter.unmerge()
    assert_close(model(ids), beside, 1e-5, "the unmerged model computes something else")


@adapters_check(needs=("mergeable",))
def check_unmerge_restores_the_weights(subject: AdapterSubject) -> None:
    """Merged and unmerged, a weight is what it was: to 1e-6 in fp32, to the bit in bf16."""
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 0.0)):
        model = odd_model(subject, dtype)
        adapter = stir(attached(subject, model))
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


@adapters_check(needs=("mergeable",))
def check_merging_twice_is_refused(subject: AdapterSubject) -> None:
    """Merging a merged adapter, or unmerging one that is not merged, is an InputError."""
    adapter = stir(attached(subject, odd_model(subject)))
    for action in (adapter.unmerge, adapter.merge, adapter.merge):
        merged = adapter.merged
        try:
            action()
        except InputError:
            assert action == adapter.unmerge or merged, "the first merge was refused"
        else:
            allowed = action == adapter.merge and not merged
            assert allowed, f"{action.__name__} was not refused"


@adapters_check(unless=("mergeable",))
def check_without_a_dense_form_merging_is_refused(subject: AdapterSubject) -> None:
    """A method without the trait `mergeable` refuses to merge, and the model stays as it was."""
    model, inputs = odd_model(subject), numbers(4, 7)
    adapter = stir(attached(subject, model))
    before = model(inputs)
    try:
        adapter.merge()
    except InputError:
        assert not adapter.merged, "it says that it is merged"
        assert torch.equal(model(inputs), before), "a refused merge has changed the model"
        return
    raise AssertionError("merging was not refused; add the trait `mergeable`")


@adapters_check(needs=("mergeable",))
def check_change_is_what_merging_adds(subject: AdapterSubject) -> None:
    """`change` is fp32, what merging adds to weight and bias as they were before the adapter came.

    A method that says it is a LoRA has s B A, of its rank.
    """
    model = odd_model(subject)
    adapter = stir(attached(subject, model))
    merged = odd_model(subject)
    stir(attached(subject, merged)).merge()
    for name, layer in adapter.layers():
        original = odd_model(subject).get_submodule(name)
        weight, bias = original.get_parameter("weight"), original._parameters.get("bias")
        change = layer.change(weight.detach(), None if bias is None else bias.detach())
        assert change is not None, "it claims `mergeable`, and has no dense form here"
        now = merged.get_submodule(name)
        site, delta = adapter.sites[name], change.weight
        if delta is None:
            delta = torch.zeros_like(weight)
        expected = (site.out_features, site.in_features)
        assert delta.dtype == torch.float32, f"the change is {delta.dtype}, it must be float32"
        assert tuple(delta.shape) == expected, f"the change is {tuple(delta.shape)}, not {expected}"
        found = now.get_parameter("weight") - weight
        assert_close(found, delta, 1e-5, "merging changes the weight by something else")
        if change.bias is not None:
            grown = now.get_parameter("bias") - (0.0 if bias is None else bias)
            assert_close(grown, change.bias, 1e-5, "merging changes the bias by something else")
        lora = layer.as_lora()
        if lora is None:
            continue
        a, b, scale = lora
        assert_close(scale * (b @ a), delta, 1e-6, "as_lora is another update than the change")
        rank = int(torch.linalg.matrix_rank(delta.detach(), rtol=1e-4))
        assert rank <= a.shape[0], f"the change has rank {rank}, its factors {a.shape[0]}"


@adapters_check()
def check_inputs_of_any_shape(subject: AdapterSubject) -> None:
    """Inputs of one, two and three dimensions, layers of odd widths, with a bias and without.

    Each row's output is its own, whatever else is in the batch; merged too, where that is possible.
    """
    model = odd_model(subject).eval()
    adapter = stir(attached(subject, model))
    shapes = ((7,), (4, 7), (2, 3, 7), (1, 7), (0, 7))
    outputs = [model(numbers(*shape)) for shape in shapes]
    for merging in (False, True):
        if merging and "mergeable" not in subject.info.traits:
            break
        if merging:
            adapter.merge()
        for shape, output in zip(shapes, outputs, strict=True):
            inputs = numbers(*shape)
            expected = (*shape[:-1], 5)
            assert output.shape == expected, f"inputs {shape} give outputs {output.shape}"
            rows = [model(row) for row in inputs.reshape(-1, 7)]
            if rows:
                what = f"with inputs {shape}, {'merging' if merging else 'one row at a time'}"
                assert_close(torch.stack(rows).view(output.shape), output, 1e-5, what)


@adapters_check()
def check_gradients_are_those_of_the_function(subject: AdapterSubject) -> None:
    """Analytic gradients of factors and inputs equal numeric ones, in float64.

    Where the method corrects the factors' gradients, those of inputs alone.
    """
    model = odd_model(subject).double()
    adapter = stir(attached(subject, model))
    model.double()  # the factors too
    if not list(adapter.parameters()):
        raise NotApplicable("the method trains nothing")
    names = [name for name, value in model.named_parameters() if value.requires_grad]
    inputs = numbers(2, 7, dtype=torch.float64).requires_grad_()

    def output(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        given = dict(zip(names, values, strict=True))
        return torch.func.functional_call(model, given, (x,))

    values: list[torch.Tensor] = [value for value in model.parameters() if value.requires_grad]
    if "corrects_gradients" in adapter.method.traits:
        values = [value.detach() for value in values]
    try:
        torch.autograd.gradcheck(output, (inputs, *values))
    except GradcheckError as error:
        raise AssertionError(f"a gradient is wrong: {str(error).splitlines()[0]}") from None


def _weights(adapter: AttachedAdapter) -> list[torch.Tensor]:
    """Copies of the base weights under the adapter."""
    bases = (adapter.model.get_submodule(name) for name in adapter.sites)
    return [base.get_parameter("weight").detach().clone() for base in bases]
