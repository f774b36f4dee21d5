"""Sums of Kronecker products: the arrangement, the best sums, and shapes for any widths."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from modicum.core.layers import kronecker
from modicum.core.layers.basis_cache import bases_kept_in
from modicum.core.layers.kronecker import KroneckerShape, kept_kronecker_svd
from modicum.core.random import normal_

SIZES = [(20, 18), (16, 16), (13, 7), (5, 13), (1, 24), (10, 64), (31, 6)]


def gaussian(*shape: int, name: str = "W") -> Tensor:
    return normal_(torch.empty(shape, dtype=torch.float64), seed=0, name=name)


def summed(shape: KroneckerShape, a: Tensor, values: Tensor, b: Tensor, terms: int) -> Tensor:
    """By torch's own Kronecker product."""
    rows, columns = shape.rows, shape.columns
    each = (values[k] * torch.kron(a[k], b[k])[:rows, :columns] for k in range(terms))
    return sum(each, torch.zeros(rows, columns, dtype=values.dtype))


@pytest.mark.parametrize("size", SIZES)
def test_all_terms_are_the_matrix_and_fewer_miss_the_other_values(size: tuple[int, int]) -> None:
    weight, shape = gaussian(*size), KroneckerShape.of(*size)
    a, values, b = kept_kronecker_svd(weight, shape)
    assert (a.shape[1:], b.shape[1:]) == (shape.outer, shape.inner)
    assert len(values) == shape.terms
    torch.testing.assert_close(summed(shape, a, values, b, shape.terms), weight, rtol=0, atol=1e-12)
    for terms in (1, len(values) // 2):
        gap = shape.rearranged(weight - summed(shape, a, values, b, terms))
        if shape.padded == size:
            assert gap.square().sum().item() == pytest.approx(
                values[terms:].square().sum().item(), rel=1e-12
            )
        else:  # a part of the error is in the padding
            assert gap.square().sum() <= values[terms:].square().sum() + 1e-12
    torch.testing.assert_close(a.square().sum((1, 2)), torch.ones_like(values))
    torch.testing.assert_close(b.square().sum((1, 2)), torch.ones_like(values))


def test_no_other_sum_of_as_many_products_is_nearer() -> None:
    weight, shape = gaussian(12, 12), KroneckerShape.of(12, 12)
    _, values, _ = kept_kronecker_svd(weight, shape)
    a = gaussian(2, *shape.outer, name="a").requires_grad_()
    b = gaussian(2, *shape.inner, name="b").requires_grad_()
    optimizer = torch.optim.LBFGS([a, b], max_iter=300, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = (shape.product(a, b) - weight).square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    least = values[2:].square().sum().item()
    found = loss().item()
    assert found == pytest.approx(least, rel=1e-4)
    assert found >= least * (1 - 1e-12)


def test_a_term_has_the_product_of_its_factors_ranks() -> None:
    shape = KroneckerShape(20, 18, outer=(4, 6), inner=(5, 3))
    a, _, b = kept_kronecker_svd(gaussian(20, 18), shape)
    assert shape.rank == 12
    assert torch.linalg.matrix_rank(shape.product(a[:1], b[:1])).item() == 12


def test_blocks_become_rows_and_a_plain_reshape_has_another_spectrum() -> None:
    a, b = gaussian(4, 3, name="a"), gaussian(5, 6, name="b")
    shape = KroneckerShape(20, 18, outer=(4, 3), inner=(5, 6))
    product = torch.kron(a, b)
    expected = a.flatten()[:, None] * b.flatten()
    torch.testing.assert_close(shape.rearranged(product), expected, rtol=0, atol=0)
    torch.testing.assert_close(shape.product(a[None], b[None]), product, rtol=0, atol=0)
    values = kept_kronecker_svd(product, shape)[1]
    assert values[1].item() < 1e-12 * values[0].item()
    plain = torch.linalg.svdvals(product.reshape(12, 30))
    assert plain[1].item() > 0.1 * plain[0].item()


@given(rows=st.integers(1, 4000), columns=st.integers(1, 4000))
def test_any_size_has_factors_that_cover_it(rows: int, columns: int) -> None:
    shape = KroneckerShape.of(rows, columns)
    for width, padded in zip((rows, columns), shape.padded, strict=True):
        assert width <= padded <= width + 2 * width**0.5
    for which in (0, 1):
        small, large = sorted((shape.outer[which], shape.inner[which]))
        assert large <= 3 * small
    if min(rows, columns) > 3:
        assert shape.rank >= min(rows, columns) / 2
        assert shape.numbers <= 4 * 2 * (rows * columns) ** 0.5 + 4


@pytest.mark.parametrize(
    ("size", "outer", "inner"),
    [
        ((4096, 4096), (64, 64), (64, 64)),
        ((11008, 4096), (128, 64), (86, 64)),
        ((256, 64), (16, 8), (16, 8)),
        ((50257, 768), (225, 24), (224, 32)),
        ((2048, 2048), (32, 32), (64, 64)),
    ],
)
def test_shapes_of_layers_that_there_are(
    size: tuple[int, int], outer: tuple[int, int], inner: tuple[int, int]
) -> None:
    shape = KroneckerShape.of(*size)
    assert (shape.outer, shape.inner) == (outer, inner)


def test_large_ones_are_randomized_and_near_the_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = KroneckerShape.of(64, 64)
    sides = [torch.linalg.qr(gaussian(64, 64, name=name)).Q for name in "UV"]
    falling = (sides[0] / torch.arange(1, 65)) @ sides[1].T
    weight = shape.product(torch.eye(64).view(64, 8, 8).double(), falling.view(64, 8, 8))
    exact = kept_kronecker_svd(weight, shape, 4)
    monkeypatch.setattr(kronecker, "LARGE", 32)
    found = kept_kronecker_svd(weight, shape, 4, name="a layer")
    for one, other in zip(found, exact, strict=True):
        assert not torch.equal(one, other)
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    again = kept_kronecker_svd(weight, shape, 4, name="a layer")
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


def test_they_are_kept_like_other_bases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, shape = gaussian(12, 12), KroneckerShape.of(12, 12)
    with bases_kept_in(tmp_path):
        first = kept_kronecker_svd(weight, shape)
        monkeypatch.setattr("modicum.core.layers.basis_cache.truncated_svd", None)
        fewer = kept_kronecker_svd(weight, shape, 2)
    assert all(torch.equal(a[:2], b) for a, b in zip(first, fewer, strict=True))
