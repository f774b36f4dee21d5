"""Low-rank factors against other factors, in every metric."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from modicum.core.errors import InputError
from modicum.core.layers.factorize import Basis, decompose, decomposed, share_rank

SIZES = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 99))
KINDS = st.sampled_from(["identity", "diagonal", "matrix"])


def drawn(outs: int, ins: int, seed: int) -> tuple[Tensor, dict[str, Tensor | None]]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outs, ins, generator=generator, dtype=torch.float64)
    inputs = torch.randn(3 * ins, ins, generator=generator, dtype=torch.float64)
    importance = torch.rand(ins, generator=generator, dtype=torch.float64) ** 3
    return weight, {"identity": None, "diagonal": importance, "matrix": inputs.mT @ inputs}


def as_matrix(metric: Tensor | None, ins: int) -> Tensor:
    if metric is None:
        return torch.eye(ins, dtype=torch.float64)
    return torch.diag(metric) if metric.ndim == 1 else metric


def error(weight: Tensor, other: Tensor, metric: Tensor) -> float:
    gap = weight - other
    return (gap @ metric * gap).sum().item()


@given(SIZES, KINDS)
def test_the_error_is_what_the_dropped_values_say(sizes: tuple[int, int, int], kind: str) -> None:
    weight, metrics = drawn(*sizes)
    metric = as_matrix(metrics[kind], sizes[1])
    basis = decompose(weight, metrics[kind])
    total = error(weight, torch.zeros_like(weight), metric)
    assert basis.error(0) == pytest.approx(total, rel=1e-10)
    for rank in range(1, min(weight.shape) + 1):
        down, up = basis.factors(weight, rank)
        assert down.shape == (rank, sizes[1])
        assert up.shape == (sizes[0], rank)
        found = error(weight, up @ down, metric)
        assert found == pytest.approx(basis.error(rank), rel=1e-6, abs=1e-12 * total)
    assert torch.allclose(up @ down, weight, atol=1e-8)  # at the last, full rank


@given(SIZES, KINDS)
def test_no_other_factors_of_the_rank_are_nearer(sizes: tuple[int, int, int], kind: str) -> None:
    weight, metrics = drawn(*sizes)
    metric = as_matrix(metrics[kind], sizes[1])
    basis = decompose(weight, metrics[kind])
    rank = max(1, min(weight.shape) // 2)
    generator = torch.Generator().manual_seed(1)
    down, up = basis.factors(weight, rank)
    rivals = [decompose(weight).factors(weight, rank)]
    for size in (1e-3, 1e-1):  # near ones, and a random subspace with its best coefficients
        shaken = [part + size * torch.randn(part.shape, generator=generator) for part in (down, up)]
        rivals.append((shaken[0], shaken[1]))
    random = torch.linalg.qr(torch.randn(sizes[0], rank, generator=generator).double())[0]
    rivals.append((random.mT @ weight, random))
    for other in rivals:
        found = error(weight, other[1] @ other[0], metric)
        assert basis.error(rank) <= found * (1 + 1e-9) + 1e-12


def test_a_constant_metric_is_a_plain_svd_and_its_scale_changes_nothing() -> None:
    weight, metrics = drawn(7, 5, 0)
    plain = decompose(weight).factors(weight, 3)
    u, s, v = torch.linalg.svd(weight)
    assert torch.allclose(plain[1] @ plain[0], u[:, :3] * s[:3] @ v[:3])
    for constant in (1e-9, 1.0, 1e9):
        for metric in (torch.full((5,), constant), constant * torch.eye(5)):
            down, up = decompose(weight, metric).factors(weight, 3)
            assert torch.allclose(up @ down, plain[1] @ plain[0])
    importance = metrics["diagonal"]
    one, other = (decompose(weight, c * importance).factors(weight, 2) for c in (1.0, 1e-7))
    assert torch.allclose(one[1] @ one[0], other[1] @ other[0])
    # Both factors keep their lengths too: training begins at the same place.
    assert torch.allclose(one[0].abs(), other[0].abs())


def test_a_metric_of_the_inputs_is_the_error_of_the_outputs() -> None:
    """The input side's form equals the projection on the outputs' principal directions."""
    weight, _ = drawn(6, 8, 3)
    inputs = torch.randn(50, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    outputs = inputs @ weight.mT
    basis = decompose(weight, inputs.mT @ inputs)
    values, vectors = torch.linalg.eigh(outputs.mT @ outputs)
    down, up = basis.factors(weight, 4)
    projected = vectors[:, -4:] @ vectors[:, -4:].mT @ weight
    assert torch.allclose(up @ down, projected)
    gap = (inputs @ (up @ down).mT - outputs).square().sum().item()
    assert gap == pytest.approx(values[:2].sum().item(), rel=1e-9)
    assert gap == pytest.approx(basis.error(4), rel=1e-9)


def test_features_without_importance_give_finite_factors() -> None:
    weight, _ = drawn(4, 6, 1)
    for metric in (torch.tensor([1.0, 0, 2, 0, 0, 3]), torch.zeros(6), torch.zeros(6, 6)):
        basis = decompose(weight, metric)
        for rank in (1, 4):
            down, up = basis.factors(weight, rank)
            assert down.isfinite().all()
            assert up.isfinite().all()
    basis = decompose(torch.zeros(3, 2))
    down, up = basis.factors(torch.zeros(3, 2), 2)
    assert torch.equal(up @ down, torch.zeros(3, 2, dtype=torch.float64))


def test_directions_have_one_length_in_both_factors() -> None:
    weight, metrics = drawn(9, 7, 2)
    down, up = decompose(weight, metrics["diagonal"]).factors(weight, 5)
    assert torch.allclose(down.norm(dim=1), up.norm(dim=0))


def test_low_precision_is_decomposed_in_float64() -> None:
    weight = drawn(5, 6, 0)[0].bfloat16()
    basis = decompose(weight)
    assert basis.left.dtype == torch.float64
    down, up = basis.factors(weight, 5)
    assert torch.equal((up @ down).bfloat16(), weight)


@pytest.mark.parametrize(
    ("metric", "problem"),
    [
        (torch.ones(4), "5 input features"),
        (torch.ones(5, 4), "5 input features"),
        (torch.tensor([1.0, 1, 1, 1, float("nan")]), "not finite"),
        (torch.tensor([1.0, 1, 1, 1, -1]), "negative"),
        (-torch.eye(5), "negative"),
    ],
)
def test_what_is_no_metric_is_refused(metric: Tensor, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        decompose(torch.ones(3, 5), metric)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(InputError, match="the weight has values that are not finite"):
        decompose(torch.tensor([[1.0, value], [2.0, 3.0]]))


def test_a_kept_decomposition_is_the_same_and_belongs_to_its_numbers(tmp_path: Path) -> None:
    weight, metrics = drawn(6, 5, 4)
    first = decomposed(weight, metrics["diagonal"], tmp_path)
    again = decomposed(weight.clone(), metrics["diagonal"], tmp_path)
    assert torch.equal(first.left, again.left)
    assert torch.equal(first.values, again.values)
    assert len(list(tmp_path.iterdir())) == 1
    decomposed(weight, None, tmp_path)
    decomposed(weight + 1e-6, metrics["diagonal"], tmp_path)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 3
    for file in files:
        file.write_bytes(file.read_bytes()[:20])  # cut off
    assert torch.equal(decomposed(weight, metrics["diagonal"], tmp_path).left, first.left)
    assert isinstance(decomposed(weight, None, None), Basis)


@given(
    st.integers(1, 5000), st.integers(1, 5000), st.floats(0.01, 0.99), st.sampled_from([1, 8, 128])
)
def test_a_share_is_kept(ins: int, outs: int, share: float, multiple: int) -> None:
    rank = share_rank(ins, outs, share, multiple)
    assert rank == 1 or rank * (ins + outs) <= share * ins * outs
    assert rank % multiple == 0 or rank < multiple
    assert (rank + multiple) * (ins + outs) > share * ins * outs - 1e-6 * ins * outs
