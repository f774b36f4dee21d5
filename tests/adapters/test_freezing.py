"""What an adapter froze is trained again when it goes, but for what another one needs frozen."""

from __future__ import annotations

import copy
import itertools
from typing import NoReturn

import pytest
import torch
from torch import nn

from modicum.adapters import AttachedAdapter, LoRA, PiSSA
from modicum.adapters.adapted_layer import take_off
from modicum.adapters.factors import FrozenBuffers
from modicum.adapters.names import plain_name
from modicum.core.layers.linear_forms import linear_form
from modicum.linears import NF4Linear
from modicum.proofs.contracts.adapters.subjects import numbers, stir

ROOTS = {"inner": "0.0", "middle": "0", "full": ""}
# On layers that are in no part.
OUTSIDE = {
    "inner": LoRA(rank=1, targets=("0",)),
    "middle": LoRA(rank=1, targets=("1",)),
    "full": LoRA(rank=1, targets=("1",), exclude=("0.1",)),
}
ORDERS = list(itertools.permutations(ROOTS))


def nested() -> nn.Sequential:
    """A model in which the user has frozen a bias."""
    inner = nn.Sequential(nn.Linear(3, 3))
    model = nn.Sequential(nn.Sequential(inner, nn.Linear(3, 3)), nn.Linear(3, 3))
    model.get_parameter("0.1.bias").requires_grad_(False)
    return model


def attached(model: nn.Module, name: str, *, everywhere: bool = True) -> AttachedAdapter:
    value = LoRA(rank=1) if everywhere else OUTSIDE[name]
    return value.attach(model.get_submodule(ROOTS[name]), name=name)


def trained(model: nn.Module) -> set[str]:
    """The names of base parameters that are trained."""
    named = model.named_parameters(remove_duplicate=False)
    found = {plain_name(name) for name, value in named if value.requires_grad}
    return {name for name in found if "layers_by_adapter" not in name}


def without(names: set[str], *adapters: str) -> set[str]:
    """Those that no adapter needs frozen."""
    roots = [f"{ROOTS[name]}." if ROOTS[name] else "" for name in adapters]
    return {name for name in names if not any(name.startswith(root) for root in roots)}


def noted(model: nn.Module) -> list[str]:
    return [key for module in model.modules() for key in vars(module) if "frozen_by" in key]


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("order", ORDERS)
def test_in_any_order_just_what_an_adapter_needs_is_frozen(
    order: tuple[str, ...], everywhere: bool
) -> None:
    for last in ORDERS:
        model = nested()
        before = trained(model)
        assert len(before) == 5
        adapters = {}
        for name in order:
            adapters[name] = attached(model, name, everywhere=everywhere)
            assert trained(model) == without(before, *adapters)
        for name in last:
            adapters.pop(name).detach()
            assert trained(model) == without(before, *adapters), (last, name)
        assert not noted(model)


def test_of_two_on_the_same_model_the_other_one_has_the_parts_too() -> None:
    model = nested()
    before = trained(model)
    part, first = attached(model, "middle"), attached(model, "full")
    second = LoRA(rank=1).attach(model, name="second")
    second.detach()
    part.detach()
    assert not trained(model)
    first.detach()
    assert trained(model) == before


def test_of_a_merged_one_the_base_is_trained_again_when_it_is_detached() -> None:
    model = nested()
    before = trained(model)
    part, full = attached(model, "middle"), stir(attached(model, "full"))
    full.merge()
    assert not trained(model)
    full.detach()
    assert trained(model) == without(before, "middle")
    stir(part).merge()
    part.detach()
    assert trained(model) == before


def test_tied_parameters_are_frozen_as_long_as_one_of_their_places_is() -> None:
    first, second = (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(2))
    model = nn.Sequential(first, second)
    second.get_submodule("1").weight = first.get_parameter("1.weight")
    before = trained(model)
    assert len(before) == 8
    one = LoRA(rank=1, targets=("0",)).attach(first, name="one")
    full = LoRA(rank=1, targets=("0.0",)).attach(model, name="full")
    other = LoRA(rank=1, targets=("0",)).attach(second, name="other")
    one.detach()
    assert not trained(model)
    full.detach()
    assert trained(model) == {"0.0.weight", "0.0.bias", "0.1.bias"}
    other.detach()
    assert trained(model) == before


def test_parameters_that_were_replaced_in_between_are_trained_again() -> None:
    model = nested()
    before = trained(model)
    part, full = attached(model, "middle"), attached(model, "full")
    for module in model.modules():
        if isinstance(module, FrozenBuffers):
            continue
        for name, old in list(module.named_parameters(recurse=False)):
            new = nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
            setattr(module, name, new)
    full.detach()
    assert trained(model) == without(before, "middle")
    part.detach()
    assert trained(model) == before


@pytest.mark.parametrize("compiled", ["model", "block"])
def test_names_are_those_of_the_plain_model(compiled: str) -> None:
    model: nn.Module = nested()
    before = trained(model)
    part = attached(model, "middle")
    if compiled == "block":
        model.add_module("0", torch.compile(model.get_submodule("0"), backend="eager"))
    else:
        model = torch.compile(model, backend="eager")
    full = LoRA(rank=1).attach(model, name="full")
    full.detach()
    assert trained(model) == without(before, "middle")
    part.detach()
    assert trained(model) == before


def test_a_copy_of_the_model_has_notes_of_its_own_and_no_state_dict_has_any() -> None:
    model, keys = nested(), set(nested().state_dict())
    before = trained(model)
    attached(model, "middle")
    attached(model, "full")
    assert all("layers_by_adapter" in key for key in set(model.state_dict()) - keys)
    copied = copy.deepcopy(model)
    take_off(copied, "full")
    assert trained(copied) == without(before, "middle")
    take_off(copied.get_submodule("0"), "middle")
    assert trained(copied) == before
    assert set(copied.state_dict()) == keys
    assert not trained(model)


def test_a_quantized_layer_that_a_merge_makes_dense_stays_frozen_but_for_its_bias() -> None:
    layer = NF4Linear.from_dense(numbers(6, 8), numbers(6, name="bias"))
    model = nn.Sequential(nn.Sequential(layer), nn.Linear(6, 4))
    before = trained(model)
    assert before == {"0.0.bias", "1.weight", "1.bias"}
    part = LoRA(rank=1).attach(model[0], name="part")
    full = LoRA(rank=1).attach(model, name="full")
    stir(full).merge(dense=torch.float32)
    full.detach()
    assert trained(model) == {"1.weight", "1.bias"}
    part.detach()
    assert isinstance(model.get_submodule("0.0"), nn.Linear)
    assert trained(model) == before


def test_a_layer_of_trained_factors_that_a_merge_makes_dense_is_trained_again() -> None:
    weight, bias = numbers(6, 8), numbers(6, name="bias")
    layer = linear_form("low_rank").from_dense(weight, bias, rank=2)
    model = nn.Sequential(nn.Sequential(layer), nn.Linear(6, 4))
    assert {"0.0.down", "0.0.up"} <= trained(model)
    part = LoRA(rank=1).attach(model[0], name="part")
    full = LoRA(rank=1).attach(model, name="full")
    stir(full).merge(dense=torch.float32)
    full.detach()
    assert trained(model) == {"1.weight", "1.bias"}
    part.detach()
    assert trained(model) == {"0.0.weight", "0.0.bias", "1.weight", "1.bias"}


def test_of_the_same_name_on_a_part_each_has_what_is_its_own() -> None:
    model = nested()
    before, inputs = trained(model), numbers(2, 3)
    full = OUTSIDE["full"].attach(model)
    part = stir(LoRA(rank=1).attach(model.get_submodule("0")))
    outputs = part.model(inputs)
    full.activate()
    assert not part.active
    part.activate()
    full.activate(alone=False)
    assert part.active
    full.detach()
    assert part.active
    assert torch.equal(part.model(inputs), outputs)
    assert trained(model) == without(before, "middle")
    part.detach()
    assert trained(model) == before
    assert not noted(model)


def test_a_layer_that_was_wrapped_since_keeps_its_adapter() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    adapter = LoRA(rank=2, targets=("0",)).attach(model)
    layer = model[0]
    model[0] = torch.compile(layer)  # nothing is compiled before it is called
    adapter.activate(0.5)
    assert layer.active == ("default",)


def test_an_adapter_that_failed_to_come_has_noted_nothing() -> None:
    model = nested()
    before, bias = trained(model), model.get_parameter("0.1.bias")
    part, first = attached(model, "middle"), attached(model, "full")
    bias.requires_grad_(True)

    def reader(name: str) -> NoReturn:
        raise OSError(name)

    with pytest.raises(OSError, match="1"):
        PiSSA(rank=1, targets=("0.1",)).attach(model, name="second", weights=reader)
    assert trained(model) == {"0.1.bias"}
    bias.requires_grad_(False)
    first.detach()
    assert trained(model) == without(before, "middle")
    part.detach()
    assert trained(model) == before
