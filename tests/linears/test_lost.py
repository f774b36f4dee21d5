"""LOST layers: what one SVD gives, the product of both paths, and files with integers in them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modicum.core.contracts.traits import TraitHolder, clashes
from modicum.core.errors import InputError
from modicum.core.layers.form_plan import FormPlan
from modicum.core.layers.linear_forms import full_weight, linear_form, make_linear
from modicum.linears import LOST, LOSTLinear
from modicum.models import create, huggingface, read_config, read_header, save
from modicum.models.safetensors_file import WEIGHTS
from modicum.proofs.contracts.base import run_battery
from modicum.proofs.contracts.linears.subjects import decoder, decoder_config, tokens


def normal(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def made(weight: Tensor, bias: Tensor | None = None, **arguments: object) -> LOSTLinear:
    layer = LOSTLinear.from_dense(weight, bias, **({"rank": 3, "channels": 0.4} | arguments))
    assert isinstance(layer, LOSTLinear)
    return layer


def unfused(layer: LOSTLinear, x: Tensor) -> Tensor:
    """Equation 4 as the paper has it: two paths, each a product of its own."""
    inner = F.linear(x, layer.down)
    inner = F.silu(inner) if layer.activation == "silu" else inner
    sparse = F.linear(x[..., layer.chosen.long()], layer.sparse)
    out = layer.gamma * F.linear(inner, layer.up) + (1 - layer.gamma) * sparse
    return out if layer.bias is None else out + layer.bias


@pytest.mark.parametrize("activation", ["silu", "identity"])
@pytest.mark.parametrize("shape", [(9, 10), (10, 7), (64, 48)])
def test_one_product_is_both_paths(activation: str, shape: tuple[int, int]) -> None:
    outs, ins = shape
    for dtype, most in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        layer = made(
            normal(outs, ins).to(dtype), normal(1, outs)[0].to(dtype), activation=activation
        )
        x = normal(5, ins, seed=1).to(dtype)
        expected = unfused(layer, x)
        assert (layer(x) - expected).norm() <= most * expected.norm()


@pytest.mark.parametrize("from_residual", [False, True])
def test_all_of_it_comes_from_one_svd(from_residual: bool) -> None:
    weight = normal(12, 10)
    layer = made(weight, from_residual=from_residual)
    low = (layer.up @ layer.down).detach()
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    residual = left[:, 3:] * values[3:] @ right[3:]
    assert torch.allclose(low + residual, weight, atol=1e-12)
    assert torch.allclose(torch.linalg.svdvals(low)[:3], values[:3])
    norms = residual.norm(dim=0)
    chosen = layer.chosen.long()
    others = [c for c in range(10) if c not in chosen.tolist()]
    assert norms[chosen].min() >= norms[others].max()
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    source = residual if from_residual else weight
    assert torch.allclose(layer.sparse, source[:, chosen], atol=1e-12)
    each = layer.up.norm(dim=0) / layer.down.norm(dim=1)
    assert torch.allclose(each, torch.ones(3, dtype=torch.float64)), (
        "the root of S is on both sides"
    )


def test_of_equal_residuals_the_first_channels_are_chosen() -> None:
    weight = torch.cat([torch.eye(4), torch.eye(4)], 1).double()
    layer = made(weight, rank=4, channels=0.5)
    assert (layer.up @ layer.down - weight).norm() < 1e-12
    exact = torch.zeros(6, 8, dtype=torch.float64)
    assert made(exact, rank=2, channels=0.5).chosen.tolist() == [0, 1, 2, 3]


def test_with_all_channels_of_the_residual_it_is_the_weight() -> None:
    weight, x = normal(6, 8), normal(4, 8, seed=1)
    half: dict[str, object] = {"rank": 3, "channels": 0.99, "gamma": 0.5, "activation": "identity"}
    layer = made(weight, **half, from_residual=True)
    assert len(layer.chosen) == 8
    assert torch.allclose(2 * layer(x), x @ weight.T, atol=1e-12)
    layer = made(weight, **(half | {"channels": 0.3}))
    expected = F.linear(F.linear(x, layer.down), layer.up)
    expected = expected + F.linear(x[:, layer.chosen.long()], weight[:, layer.chosen.long()])
    assert torch.allclose(2 * layer(x), expected, atol=1e-12)


def test_the_identity_merges_and_silu_says_why_not() -> None:
    weight = normal(7, 9)
    layer = made(weight, activation="identity", gamma=0.7)
    by_hand = 0.7 * layer.up @ layer.down
    by_hand[:, layer.chosen.long()] += 0.3 * layer.sparse
    assert torch.allclose(full_weight(layer), by_hand, atol=1e-12)
    with pytest.raises(InputError, match="no dense weight: silu lies between its factors"):
        full_weight(made(weight))


def test_elements_are_those_of_the_formula() -> None:
    value = LOST(share=0.5, channels=0.03)
    arguments = value.arguments(512, 1376)
    assert arguments is not None
    rank, chosen = arguments["rank"], round(0.03 * 512)
    layer = make_linear("lost", 512, 1376, False)
    assert sum(p.numel() for p in layer.parameters()) == rank * (512 + 1376) + chosen * 1376
    assert sum(p.numel() for p in layer.parameters()) <= 0.5 * 512 * 1376
    assert linear_form("lost").weight_bytes(512, 1376) == 4 * chosen + sum(
        p.nbytes for p in layer.parameters()
    )
    assert value.arguments(2, 3) is None


def test_input_gradients_are_those_of_the_masked_dense_layer() -> None:
    layer, x = made(normal(6, 8), gamma=0.6), normal(4, 8, seed=1).requires_grad_()
    out = normal(4, 6, seed=2)
    mask = torch.zeros(8, dtype=torch.float64).index_fill(0, layer.chosen.long(), 1)
    dense = torch.zeros(6, 8, dtype=torch.float64)
    dense[:, layer.chosen.long()] = layer.sparse.detach()
    reference = 0.6 * F.linear(F.silu(F.linear(x, layer.down)), layer.up) + 0.4 * F.linear(
        x * mask, dense
    )
    (expected,) = torch.autograd.grad(reference, x, out)
    (found,) = torch.autograd.grad(layer(x), x, out)
    assert torch.allclose(found, expected, atol=1e-12)


def test_new_layers_begin_with_the_dense_layers_own_weight() -> None:
    value = LOST.tiny()
    config = decoder_config(value)
    model, dense = create(config, 3), create(replace(config, forms=FormPlan()), 3)
    for name, form in config.forms.layers.items():
        weight = dense.get_submodule(name).get_parameter("weight")
        expected = linear_form("lost").from_dense(weight.detach(), None, **form.arguments)
        found = model.get_submodule(name)
        for key, tensor in expected.state_dict().items():
            assert torch.equal(found.state_dict()[key], tensor), f"{name}.{key}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_hold_the_chosen_channels_as_integers(tmp_path: Path, dtype: torch.dtype) -> None:
    model = decoder(LOST.tiny()).to(dtype)
    folder = save(model, tmp_path / "model")
    assert read_config(folder).forms == model.config.forms
    held = read_header(folder).tensors
    chosen = {name for name in held if name.endswith(".chosen")}
    assert len(chosen) == len(model.config.forms.layers)
    assert {held[name].dtype for name in chosen} == {"I32"}
    again = huggingface.load(folder)
    assert torch.equal(again(tokens()), model(tokens()))
    second = save(again, tmp_path / "again")
    assert (second / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    raw = json.loads((folder / "config.json").read_text())
    layer = next(iter(raw["forms"]["layers"]))
    raw["forms"]["layers"][layer]["channels"] = 0.5
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match=layer.replace(".", r"\.")):
        read_header(folder)


def test_adapters_are_refused_on_layers_that_are_trained_in_this_form() -> None:
    adapter = TraitHolder("adapter", frozenset({"adapts_base"}))
    silu, identity = (LOST.tiny(activation=word).traits for word in ("silu", "identity"))
    for traits in (silu, identity):
        found = clashes([TraitHolder("linear", traits), adapter])
        assert [clash.why[:35] for clash in found] == ["an adapter freezes the layers that "]
    assert "mergeable" in identity - silu


def test_the_battery_holds_with_the_identity() -> None:
    results = run_battery(LOST.tiny(activation="identity"), cheap_only=True)
    assert [r.message for r in results if not r.passed] == []
    ran = {r.name for r in results if not r.skipped}
    assert {"it_is_the_linear_map_of_its_weight", "put_in_and_taken_out", "files"} <= ran
