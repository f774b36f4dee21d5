"""What SoKA promises exactly: its start, its two ways to compute, and its terms by the weights."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from modicum.adapters import load
from modicum.adapters.kronecker import kronecker_map
from modicum.adapters.soka import SoKA, SoKALayer
from modicum.core.errors import InputError
from modicum.core.layers.kronecker import KroneckerShape, kept_kronecker_svd
from modicum.linears import NF4Linear
from modicum.proofs.contracts.adapters.subjects import (
    distance,
    llama,
    numbers,
    odd_model,
    stir,
    tokens,
)


def model_of(*weights: Tensor) -> nn.Sequential:
    layers = [
        nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype) for weight in weights
    ]
    with torch.no_grad():
        for layer, weight in zip(layers, weights, strict=True):
            layer.weight.copy_(weight)
    return nn.Sequential(*layers)


def layer_of(weight: Tensor, value: SoKA) -> tuple[nn.Sequential, SoKALayer]:
    model = model_of(weight)
    [(_, layer)] = value.attach(model).layers()
    assert isinstance(layer, SoKALayer)
    return model, layer


def gaussian(*shape: int, name: str = "W") -> Tensor:
    return numbers(*shape, name=name, dtype=torch.float64)


@pytest.mark.parametrize("size", [(24, 15), (13, 7)])
def test_without_the_matrix_it_is_the_product_with_it(size: tuple[int, int]) -> None:
    shape, inputs = KroneckerShape.of(*size), gaussian(9, size[1])
    a, b = gaussian(3, *shape.outer, name="a"), gaussian(3, *shape.inner, name="b")
    dense = sum(torch.kron(one, two) for one, two in zip(a, b, strict=True))
    expected = inputs @ dense[: size[0], : size[1]].T
    found = kronecker_map(inputs, a, b, shape)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_it_begins_with_the_best_terms_and_the_base_keeps_the_residual() -> None:
    weight = gaussian(24, 16)
    model, layer = layer_of(weight, SoKA(rank=3))
    _, values, _ = kept_kronecker_svd(weight, layer.shape)
    residual = model[0].weight.detach()
    torch.testing.assert_close(residual + layer.taken(), weight, rtol=0, atol=1e-12)
    lost = residual.square().sum().item()
    assert lost == pytest.approx(values[3:].square().sum().item(), rel=1e-10)
    root = values[:3].sqrt()
    for factor in (layer.outer, layer.inner):  # sigma is split evenly
        torch.testing.assert_close(factor.flatten(1).norm(dim=1), root)
    assert torch.equal(layer.outer, layer.outer_0)
    assert not layer.delta().any()
    # All terms leave nothing.
    model, layer = layer_of(weight, SoKA(rank=layer.shape.terms))
    assert model[0].weight.abs().max().item() < 1e-12


@pytest.mark.parametrize("size", [(24, 16), (13, 7)])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_built_and_factored_are_one_function(size: tuple[int, int], dropout: float) -> None:
    weight, inputs = gaussian(*size), gaussian(11, size[1], name="x")
    found = []
    for product in ("built", "factored"):
        model, layer = layer_of(weight, SoKA(rank=2, product=product, dropout=dropout))
        with torch.no_grad():
            layer.outer.add_(gaussian(*layer.outer.shape, name="a"))
        x = inputs.clone().requires_grad_()
        torch.manual_seed(3)
        outputs = model(x)
        outputs.square().sum().backward()
        found.append((outputs, x.grad, layer.outer.grad, layer.inner.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    if not dropout:
        dense = weight + layer.delta().detach()
        torch.testing.assert_close(outputs, inputs @ dense.T, rtol=0, atol=1e-11)
        expected = (2 * (inputs @ dense.T)) @ dense
        torch.testing.assert_close(x.grad, expected, rtol=0, atol=1e-9)


def test_few_positions_are_factored_and_many_are_built() -> None:
    shape = KroneckerShape.of(256, 256)
    found = [SoKA().builds(shape, 2, positions) for positions in (1, 10_000)]
    assert found == [(False, False), (True, True)]
    wide = KroneckerShape.of(4096, 4096)  # where the gradient of the matrix is much work
    assert SoKA().builds(wide, 2, 4096) == (True, False)


def test_below_fp32_small_changes_of_large_weights_are_not_lost() -> None:
    weight, inputs = 100 + numbers(64, 64, name="W"), numbers(200, 64)
    model, layer = layer_of(weight.bfloat16(), SoKA(rank=1, product="built"))
    before = model(inputs.bfloat16()).float()
    with torch.no_grad():
        layer.inner.mul_(1 + 1e-3)  # less than a bf16 digit of W
    changed = model(inputs.bfloat16()).float() - before
    assert bool((changed != 0).any())


def test_a_product_has_one_term_and_no_more_can_be_asked_for() -> None:
    shape = KroneckerShape.of(24, 16)
    weight = torch.kron(numbers(*shape.outer, name="P"), numbers(*shape.inner, name="Q"))
    model = model_of(weight)
    adapter = SoKA(rank=None, energy=1.0).attach(model)
    assert [site.prepared for site in adapter.sites.values()] == [{"rank": 1}]
    assert model[0].weight.abs().max().item() < 1e-5
    adapter.detach()
    with pytest.raises(InputError, match="above 1, the Kronecker terms that the weight of 0 has"):
        SoKA(rank=2).attach(model)
    torch.testing.assert_close(model[0].weight.detach(), weight, rtol=0, atol=1e-5)
    assert type(model[0]) is nn.Linear


def test_flat_spectra_need_the_cap() -> None:
    value = SoKA(rank=None, most=1000)
    [site] = value.attach(model_of(numbers(64, 64, name="W"))).sites.values()
    assert site.prepared["rank"] > 10
    [site] = SoKA(rank=None, most=5).attach(model_of(numbers(64, 64, name="W"))).sites.values()
    assert site.prepared == {"rank": 5}


def test_energy_and_elbow_decide_by_the_smaller() -> None:
    shape = KroneckerShape.of(16, 16)
    a, _, b = kept_kronecker_svd(numbers(16, 16), shape)

    def with_values(values: list[float]) -> nn.Sequential:
        count = len(values)
        return model_of(shape.product(torch.tensor(values)[:, None, None] * a[:count], b[:count]))

    sharp = [9.0, 8.0, 1.0, 0.9, 0.8, 0.7]  # the elbow is after two, 0.99 of the squares after 3
    for energy, expected in ((0.5, 1), (0.9, 2), (0.99, 2)):
        [site] = SoKA(rank=None, energy=energy).attach(with_values(sharp)).sites.values()
        assert site.prepared == {"rank": expected}
    even = [2.0] * 6
    for energy, expected in ((0.4, 3), (0.99, 6)):
        [site] = SoKA(rank=None, energy=energy).attach(with_values(even)).sites.values()
        assert site.prepared["rank"] == expected


def test_a_total_goes_where_most_is_held() -> None:
    weights = [numbers(16, 16, name="one"), 3 * numbers(24, 16, name="two"), numbers(16, 24)]
    total = 400
    model = model_of(*weights)
    adapter = SoKA(rank=None, total=total, most=8).attach(model)
    assert sum(parameter.numel() for parameter in adapter.parameters()) <= total
    shapes = [adapter.method.shape(site) for site in adapter.sites.values()]
    held = [
        kept_kronecker_svd(weight, shape)[1][:8].square().cumsum(0).tolist()
        for weight, shape in zip(weights, shapes, strict=True)
    ]
    ranks = tuple(site.prepared["rank"] for site in adapter.sites.values())

    def worth(each: tuple[int, ...]) -> float:
        return sum(values[rank - 1] for values, rank in zip(held, each, strict=True))

    def cost(each: tuple[int, ...]) -> int:
        return sum(shape.numbers * rank for shape, rank in zip(shapes, each, strict=True))

    every = itertools.product(range(1, 9), repeat=3)
    best = max((each for each in every if cost(each) <= total), key=worth)
    assert worth(ranks) == pytest.approx(worth(best), rel=1e-6)
    assert ranks[1] > max(ranks[0], ranks[2])
    for (_, layer), rank in zip(adapter.layers(), ranks, strict=True):
        assert len(layer.get_parameter("outer")) == rank


def test_on_meta_the_bound_is_what_a_layer_may_have() -> None:
    sizes = {}
    for fields in ({}, {"most": 3}, {"total": 1000}):
        adapter = SoKA(rank=None, **fields).attach(llama("meta"))
        sizes[str(fields)] = [adapter.method.rank_at(site) for site in adapter.sites.values()]
        for site, rank in zip(adapter.sites.values(), sizes[str(fields)], strict=True):
            assert adapter.method.trained(site) == rank * adapter.method.shape(site).numbers
    assert max(sizes["{'most': 3}"]) == 3
    assert max(sizes["{'total': 1000}"]) <= 16
    ranks = [site.prepared["rank"] for site in SoKA(rank=None).attach(llama()).sites.values()]
    assert all(one <= most for one, most in zip(ranks, sizes["{}"], strict=True))


def test_terms_by_layer_are_kept_in_files(tmp_path: Path) -> None:
    model, other, ids = llama(), llama(), tokens()
    adapter = stir(SoKA(rank=None, total=1200).attach(model))
    adapter.save(tmp_path)
    again = load(other, tmp_path)
    assert [site.prepared for site in again.sites.values()] == [
        site.prepared for site in adapter.sites.values()
    ]
    assert len({site.prepared["rank"] for site in again.sites.values()}) > 1
    assert torch.equal(other(ids), model(ids))
    with pytest.raises(InputError, match="no plain LoRA"):
        adapter.save(tmp_path / "peft", form="peft")


def test_a_quantized_base_gets_terms_of_the_files_weights(tmp_path: Path) -> None:
    exact = [numbers(64, 32, name="one"), numbers(32, 64, name="two")]
    model = nn.Sequential(*(NF4Linear.from_dense(weight) for weight in exact))
    with pytest.raises(InputError, match="starts from the full-precision weight"):
        SoKA(rank=None, total=1000).attach(model)
    adapter = SoKA(rank=None, total=1000).attach(model, weights=lambda name: exact[int(name)])
    dense = SoKA(rank=None, total=1000).attach(model_of(*exact))
    assert [site.prepared for site in adapter.sites.values()] == [
        site.prepared for site in dense.sites.values()
    ]
    for (_, one), (_, other) in zip(adapter.layers(), dense.layers(), strict=True):
        assert torch.equal(one.get_parameter("outer"), other.get_parameter("outer"))
    inputs = numbers(5, 32)
    expected = stir(adapter).model(inputs)
    adapter.save(tmp_path)
    other = nn.Sequential(*(NF4Linear.from_dense(weight) for weight in exact))
    load(other, tmp_path)
    assert torch.equal(other(inputs), expected)
    adapter.merge(dense=torch.float32)
    assert distance(model(inputs), expected) < 1e-5


@pytest.mark.parametrize(
    ("value", "said", "field"),
    [
        (SoKA(rank=100), "above 12, the Kronecker terms of the layer wide", "rank"),
        (SoKA(total=1000), "set rank to null", "total"),
        (SoKA(rank=None, total=10), "least amounts cost", "total"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_and_the_model_left(
    value: SoKA, said: str, field: str
) -> None:
    model, inputs = odd_model(), numbers(3, 7)
    before = model(inputs)
    with pytest.raises(InputError, match=said) as error:
        value.attach(model)
    assert error.value.field == field
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(model(inputs), before)


@pytest.mark.parametrize("rank", [1, None])
def test_layers_without_terms_are_refused(rank: int | None) -> None:
    for layer, said in (
        (nn.Linear(2, 2), "a Kronecker term of a 2 x 2 layer has as many numbers as the layer"),
        (nn.Embedding(9, 6), "SoKA adapts linear layers"),
    ):
        with pytest.raises(InputError, match=said):
            SoKA(rank=rank, targets=("0",)).attach(nn.Sequential(layer, nn.Linear(6, 6)))
    with pytest.raises(InputError, match="its weight is zero, so it has no terms"):
        SoKA(rank=rank).attach(model_of(torch.zeros(8, 8)))
    broken = torch.ones(8, 8)
    broken[1, 1] = float("nan")
    with pytest.raises(InputError, match="not finite"):
        SoKA(rank=rank).attach(model_of(broken))
