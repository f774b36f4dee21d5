"""Patches of a weight: places of both kinds, overlaps, transposed weights, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from modicum.adapters import LoRA, SHiRA
from modicum.adapters.patch_places import Columns, Entries, Places
from modicum.adapters.patching import Patched, written
from modicum.adapters.sites import Site
from modicum.core.errors import InputError
from modicum.proofs.bench.meters import saved_bytes
from modicum.proofs.contracts.adapters.subjects import numbers, stir

OUT, IN = 5, 7


def site(*, transposed: bool = False) -> Site:
    return Site("layer", "linear", IN, OUT, transposed)


def indices(*places: int) -> Tensor:
    return torch.tensor(places, dtype=torch.int32)


def places_of(kind: str, *, transposed: bool = False) -> tuple[Places, Tensor]:
    if kind == "slice":
        next_to = Columns(indices(2, 3, 4), site(transposed=transposed), 2)
        return next_to, numbers(OUT, 3, name="slice")
    if kind == "columns":
        found: Places = Columns(indices(1, 4), site(transposed=transposed))
        return found, numbers(OUT, 2, name="columns")
    found = Entries(indices(1, 4, 8, 20, 34), site(transposed=transposed))
    return found, numbers(5, name="entries")


def dense(places: Places, values: Tensor) -> Tensor:
    change = torch.zeros(OUT, IN)
    change[places.rows_and_columns()] = values
    return change


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "kinds", [["entries"], ["columns"], ["slice"], ["entries", "columns", "slice"]], ids=str
)
def test_patches_stand_in_the_weight_and_leave_it(kinds: list[str], transposed: bool) -> None:
    weight = numbers(OUT, IN)
    stored = (weight.T if transposed else weight).contiguous()
    before = stored.clone()
    pairs = [places_of(kind, transposed=transposed) for kind in kinds]
    places, values = zip(*pairs, strict=True)
    expected = weight + sum(dense(*pair) for pair in pairs)
    with written(stored, places, values):
        found = stored.T if transposed else stored
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert torch.equal(stored, before)
    with pytest.raises(KeyError), written(stored, places, values):
        raise KeyError
    assert torch.equal(stored, before)


def test_overlapping_patches_are_rounded_once() -> None:
    """In bf16 1 + 1/512 + 1/512 is 1 where each sum is rounded, and 1 + 1/256 where the last is.

    The nearest to the second are 1 and 1 + 1/128, and a half goes to the even one; so thrice.
    """
    stored = torch.ones(OUT, IN, dtype=torch.bfloat16)
    places = [Entries(indices(3), site())] * 3
    with written(stored, places, [torch.tensor([1 / 512])] * 3):
        assert stored[0, 3].item() == 1 + 1 / 128


@pytest.mark.parametrize("kind", ["entries", "columns", "slice"])
def test_rows_of_a_weight_have_their_own_entries(kind: str) -> None:
    places, values = places_of(kind)
    full = dense(places, values)
    for first, last in ((0, 2), (2, 5), (4, 4)):
        part = torch.zeros(last - first, IN)
        spot = places.spot(part, first)
        spot.write(spot.pick(values))
        assert torch.equal(part, full[first:last])


@pytest.mark.parametrize("kind", ["entries", "columns", "slice"])
@pytest.mark.parametrize("shape", [(IN,), (3, IN), (2, 3, IN), (0, IN)], ids=str)
def test_gradients_are_the_dense_ones(kind: str, shape: tuple[int, ...]) -> None:
    layer, (places, values) = nn.Linear(IN, OUT), places_of(kind)
    layer.weight.requires_grad_(False)
    values.requires_grad_()
    inputs = numbers(*shape).requires_grad_()
    product = Patched(layer, layer.forward, (places,))
    weight = (layer.weight + dense(places, values.detach())).requires_grad_()
    other = inputs.detach().clone().requires_grad_()
    outputs, expected = product(inputs, [values]), nn.functional.linear(other, weight, layer.bias)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-6)
    bias = torch.autograd.grad(expected.square().sum(), [other, weight, layer.bias])
    found = torch.autograd.grad(outputs.square().sum(), [inputs, values, layer.bias])
    index = places.rows_and_columns()
    for mine, theirs in zip(found, (bias[0], bias[1][index], bias[2]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_second_derivatives_are_those_of_the_dense_weight() -> None:
    layer, (places, values) = nn.Linear(IN, OUT), places_of("entries")
    layer.requires_grad_(False)
    product = Patched(layer.double(), layer.forward, (places,))
    inputs = numbers(3, IN).double()

    def output(x: Tensor, v: Tensor) -> Tensor:
        return product(x, [v]).tanh()

    asked = (inputs.requires_grad_(), values.double().requires_grad_())
    assert torch.autograd.gradgradcheck(output, asked)


def test_columns_keep_their_inputs_alone() -> None:
    layer, (places, values) = nn.Linear(IN, OUT).requires_grad_(False), places_of("columns")
    product, inputs = Patched(layer, layer.forward, (places,)), numbers(30, IN).requires_grad_()
    with saved_bytes([values]) as saved:
        product(inputs, [values.requires_grad_()])
    assert saved.total == 30 * 2 * 4


def test_an_adapter_that_is_switched_before_the_backward_pass() -> None:
    """What another pass of the same layer has in its weight is not what this one multiplies by."""
    model, inputs = nn.Sequential(nn.Linear(IN, OUT)), numbers(3, IN).requires_grad_()
    adapter = stir(SHiRA(rank=1).attach(model))
    loss = model(inputs).square().sum()
    with adapter.disabled():
        loss = loss + model(inputs).square().sum()
    (found,) = torch.autograd.grad(loss, [inputs])
    weight = model[0].weight
    [(_, layer)] = adapter.layers()
    one, two = ((inputs @ w.T + model[0].bias, w) for w in (weight + layer.delta(), weight))
    expected = 2 * one[0] @ one[1] + 2 * two[0] @ two[1]
    torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("first", ["patch", "lora"])
def test_a_lora_on_a_patched_layer_adds_to_it(first: str) -> None:
    model, inputs = nn.Sequential(nn.Linear(IN, OUT)), numbers(3, IN)
    makers = {"patch": SHiRA(rank=1), "lora": LoRA(rank=2)}
    order = [first, *(name for name in makers if name != first)]
    adapters = [stir(makers[name].attach(model, name=name)) for name in order]
    adapters[0].activate()
    adapters[1].activate(alone=False)
    change = sum(layer.delta() for adapter in adapters for _, layer in adapter.layers())
    expected = inputs @ (model[0].weight + change).T + model[0].bias
    torch.testing.assert_close(model(inputs), expected, rtol=1e-5, atol=1e-5)


def test_values_that_change_before_the_backward_pass_are_an_error() -> None:
    model = nn.Sequential(nn.Linear(IN, OUT), nn.Linear(OUT, OUT))
    adapter = SHiRA(rank=1).attach(model)
    loss = model(numbers(3, IN)).sum()
    stir(adapter)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_merged_patches_that_share_entries_come_out_in_reverse_order() -> None:
    model = nn.Sequential(nn.Linear(IN, OUT))
    before = model[0].weight.detach().clone()
    one, two = (
        stir(SHiRA(rank=2, mask="magnitude").attach(model, name=name)) for name in ("one", "two")
    )
    one.merge()
    two.merge()
    with pytest.raises(InputError, match="reverse order"):
        one.unmerge()
    two.unmerge()
    one.unmerge()
    assert torch.equal(model[0].weight, before)


def test_a_weight_with_too_many_entries_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2**16, 2**15))
    with pytest.raises(InputError, match="32 bits"):
        SHiRA(rank=1).attach(model)
