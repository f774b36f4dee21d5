"""Tensors that adapters derive from base weights: made again, checked, and kept precise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.adapters import load
from modicum.adapters.base import Adapter
from modicum.adapters.deriving_layer import SAME_BASIS, fingerprint
from modicum.adapters.directions import Directions, DirectionsLayer
from modicum.adapters.loldu import LoLDU
from modicum.adapters.lora_xs import LoRAXS
from modicum.adapters.svfit import SVFit
from modicum.core.contracts.parameters import metadata, optimizer_groups
from modicum.core.errors import InputError
from modicum.core.layers.basis_cache import bases_kept_in
from modicum.core.layers.linear_forms import full_weight, linear_form
from modicum.core.layers.meta import materialise, on_meta
from modicum.linears import NF4Linear
from modicum.proofs.contracts.adapters.subjects import llama, numbers, odd_model, stir, tokens

METHODS: list[Adapter] = [SVFit(rank=4), LoLDU()]
each_method = pytest.mark.parametrize("value", METHODS, ids=lambda value: value.info.name)


def quantized() -> nn.Module:
    model = odd_model()
    for name in ("wide", "narrow"):
        layer = model.get_submodule(name)
        bias = None if layer.bias is None else layer.bias.detach()
        model.set_submodule(name, NF4Linear.from_dense(layer.weight.detach(), bias))
    return model


def dense_weight(name: str) -> Tensor:
    return odd_model().get_submodule(name).weight.detach()


@each_method
def test_a_quantized_base_needs_a_reader_of_its_weights(value: Adapter, tmp_path: Path) -> None:
    model = quantized()
    before = model(numbers(3, 7))
    with pytest.raises(InputError, match="give `weights`"):
        value.attach(model)
    assert type(model.get_submodule("wide")) is NF4Linear
    adapter = stir(value.attach(model, weights=dense_weight))
    dense = stir(value.attach(odd_model()))
    for (_, one), (_, other) in zip(adapter.layers(), dense.layers(), strict=True):
        assert torch.equal(one.delta(), other.delta())
    outputs = model(numbers(3, 7))
    assert not torch.equal(outputs, before)
    adapter.save(tmp_path / "own", form="modicum")
    again = quantized()
    with pytest.raises(InputError, match="give `weights`"):
        load(again, tmp_path / "own")
    assert torch.equal(again(numbers(3, 7)), before)
    load(again, tmp_path / "own", weights=dense_weight)
    assert torch.equal(again(numbers(3, 7)), outputs)


@each_method
def test_another_base_is_refused_and_left_as_it_was(value: Adapter, tmp_path: Path) -> None:
    stir(value.attach(odd_model())).save(tmp_path / "own", form="modicum")
    other = odd_model()
    with torch.no_grad():
        other.get_submodule("narrow").weight.add_(numbers(5, 13, name="other"), alpha=0.1)
    before, names = other(numbers(3, 7)), [name for name, _ in other.named_modules()]
    with pytest.raises(InputError, match="the base model is another") as caught:
        load(other, tmp_path / "own")
    assert "narrow" in str(caught.value)
    assert [name for name, _ in other.named_modules()] == names
    assert torch.equal(other(numbers(3, 7)), before)
    adapter = value.attach(other)
    mine = {name: each.clone() for name, each in adapter.state_dict().items()}
    with pytest.raises(InputError, match="the base model is another"):
        adapter.load_state_dict(stir(value.attach(odd_model())).state_dict())
    assert all(torch.equal(each, mine[name]) for name, each in adapter.state_dict().items())


@each_method
def test_a_full_state_dict_brings_the_weights_that_a_basis_is_of(value: Adapter) -> None:
    model, inputs = odd_model(), numbers(3, 7)
    stir(value.attach(model))
    others = [odd_model(), odd_model()]
    for other in others:
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(-0.5).add_(0.1)
        value.attach(other)
    others[0].load_state_dict(model.state_dict())
    torch.testing.assert_close(others[0](inputs), model(inputs))
    state = model.state_dict()
    state["wide.weight"] = state["wide.weight"] + 0.1 * numbers(13, 7, name="changed")
    with pytest.raises(RuntimeError, match="the base model is another"):
        others[1].load_state_dict(state)


def test_equal_singular_values_that_turned_are_noticed() -> None:
    weight = torch.diag(torch.tensor([3.0, 2.0, 2.0, 1.0]))

    class Turned(DirectionsLayer):
        method: Directions

        def directions(self, weight: Tensor) -> dict[str, Tensor]:
            up, down = torch.eye(4), torch.eye(4)
            turn = torch.tensor([[0.6, 0.8], [-0.8, 0.6]])
            up[:, 1:3] = up[:, 1:3] @ turn
            down[1:3] = turn.T @ down[1:3]
            return {"up": up, "down": down}

    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(weight)
    [(_, layer)] = SVFit(rank=4).attach(model).layers()
    assert isinstance(layer, DirectionsLayer)
    turned = Turned(layer.method, layer.site, layer.shared).derive(weight)
    singular = torch.tensor([3.0, 2.0, 2.0, 1.0])
    torch.testing.assert_close(turned["up"] * singular @ turned["down"], weight)
    with pytest.raises(InputError, match="equal singular values"):
        layer.check_fingerprint(turned["fingerprint"])


def test_a_fingerprint_is_of_products_and_robust_to_rounding() -> None:
    up, down = numbers(30, 8, name="up"), numbers(8, 20, name="down")
    signs = torch.tensor([1.0, -1] * 4)
    own = fingerprint(up, down)
    torch.testing.assert_close(fingerprint(up * signs, down * signs[:, None]), own)
    near = fingerprint(up + 1e-4 * numbers(30, 8, name="noise"), down)
    assert (near - own).abs().max() < SAME_BASIS
    order = torch.tensor([1, 0, *range(2, 8)])
    assert (fingerprint(up[:, order], down[order]) - own).abs().max() > SAME_BASIS
    assert own.abs().max() < 5


@each_method
def test_a_basis_stays_precise_whatever_dtype_the_model_gets(value: Adapter) -> None:
    model = odd_model()
    adapter = stir(value.attach(model))
    before = {
        key: each.clone() for _, layer in adapter.layers() for key, each in layer.named_buffers()
    }
    model.bfloat16()
    for _, layer in adapter.layers():
        assert {layer.up.dtype, layer.down.dtype} == {torch.float32}
        assert layer.fingerprint.dtype == torch.float16
        assert {each.dtype for each in layer.parameters()} == {torch.bfloat16}
    assert before.keys() == {
        key for _, layer in adapter.layers() for key, _ in layer.named_buffers()
    }
    assert model(numbers(3, 7).bfloat16()).dtype == torch.bfloat16


@each_method
def test_multipliers_survive_meta_and_reach_groups(value: Adapter) -> None:
    model = llama("meta")
    adapter = value.attach(model)
    model.to_empty(device="cpu").initialise(0)
    adapter.initialise()
    with on_meta():
        other = llama("meta")
        attached = value.attach(other)
    materialise(other, "cpu")
    other.initialise(0)
    attached.initialise()
    [group] = optimizer_groups(other, learning_rate=0.1, weight_decay=0.5)
    factor = value.factors(next(iter(attached.sites.values())))["shift"]
    assert (factor.learning_rate, factor.weight_decay) != (1.0, None)
    assert group["lr"] == pytest.approx(0.1 * factor.learning_rate)
    assert group["weight_decay"] == 0.5 * (factor.weight_decay or 0.0)
    rates = {metadata(each).learning_rate_multiplier for each in attached.parameters()}
    assert rates == {factor.learning_rate}
    assert torch.equal(other(tokens()), llama()(tokens()))


@each_method
def test_what_the_cache_holds_has_the_bits_of_what_is_made(value: Adapter, tmp_path: Path) -> None:
    plain = stir(value.attach(odd_model()))
    with bases_kept_in(tmp_path / "bases"):
        first = stir(value.attach(odd_model()))
        files = sorted(file.name for file in (tmp_path / "bases").iterdir())
        second = stir(value.attach(odd_model()))
    assert len(files) == 2
    for (_, one), (_, two), (_, three) in zip(
        plain.layers(), first.layers(), second.layers(), strict=True
    ):
        assert torch.equal(one.delta(), two.delta())
        assert torch.equal(one.delta(), three.delta())


@pytest.mark.parametrize("form", ["nf4", "int8", "tiles", "low_rank"])
@pytest.mark.parametrize("value", [*METHODS, LoRAXS(rank=3)], ids=lambda value: value.info.name)
def test_on_bases_of_every_form_it_adds_its_change_and_learns(value: Adapter, form: str) -> None:
    weight, bias = numbers(24, 16, name="weight") * 0.3, numbers(24, name="bias")
    fields = {"rank": 6} if form == "low_rank" else {}
    base = linear_form(form).from_dense(weight, bias, **fields)
    model, inputs = nn.Sequential(base).requires_grad_(False), numbers(5, 16, name="inputs")
    before = model(inputs)
    adapter = value.with_fields(targets=("0",)).attach(model, weights=lambda name: weight)
    torch.testing.assert_close(model(inputs), before, rtol=0, atol=1e-4)
    [(_, layer)] = stir(adapter).layers()
    expected = before + inputs @ layer.delta().T
    torch.testing.assert_close(model(inputs), expected, rtol=1e-4, atol=1e-4)
    model(inputs).square().sum().backward()
    assert all(parameter.grad.any() for parameter in adapter.parameters())
    assert all(parameter.grad is None for parameter in base.parameters(recurse=False))


@each_method
@pytest.mark.parametrize("spoilt", ["zero", "nan"])
def test_weights_without_directions_are_refused(value: Adapter, spoilt: str) -> None:
    model = odd_model()
    with torch.no_grad():
        model.get_submodule("narrow").weight.fill_(0.0 if spoilt == "zero" else torch.nan)
    with pytest.raises(InputError, match="is zero" if spoilt == "zero" else "not finite"):
        value.attach(model)
    assert type(model.get_submodule("narrow")) is nn.Linear
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_of_a_layer_that_is_factors_the_basis_is_of_what_they_make() -> None:
    base = linear_form("low_rank").from_dense(numbers(9, 12), numbers(9), rank=4)
    model = nn.Sequential(base).requires_grad_(False)
    inputs = numbers(5, 12, name="inputs")
    before = model(inputs)

    def nothing(layer: str) -> Tensor:
        raise InputError("the model's file has no weight of this layer", value=layer)

    for weights in (None, nothing):
        adapter = SVFit(rank=3, targets=("0",)).attach(model, weights=weights)
        [(_, layer)] = adapter.layers()
        left, right = (F.normalize(each, dim=0) for each in (layer.up, layer.down.T))
        found = (left.T @ full_weight(base) @ right).diagonal()
        expected = torch.linalg.svdvals(full_weight(base))[:3]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model(inputs), before, rtol=0, atol=1e-5)
        adapter.detach()
