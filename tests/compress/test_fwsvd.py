"""FWSVD against plain SVD, the paper's formula, and what the loss really depends on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from modicum.compress import FWSVD, Calibration, calibrate
from modicum.compress.base import CompressorQuery
from modicum.compress.dense_layers import DenseLayer
from modicum.core.contracts.ledger import Ledger, ModelQuery
from modicum.core.contracts.parameters import ParameterMetadata, describe_parameter, metadata
from modicum.core.errors import InputError
from modicum.core.layers.factorize import decompose
from modicum.core.layers.linear_forms import full_weight


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 6, bias=False))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(16, 9, generator=generator), torch.randn(16, 6, generator=generator))
        for _ in range(3)
    ]


def loss(of: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (of(batch[0]) - batch[1]).square().sum()


def known(importance: Tensor, name: str = "0") -> Calibration:
    """A calibration that found this mean over one example."""
    return Calibration({("fisher", name): importance.double()}, 1, {name: 1})


def product(value: FWSVD, calibration: Calibration, seed: int = 0) -> Tensor:
    of = model(seed)
    value.fit(of, calibration)
    return full_weight(of[0]).detach()


ONLY = {"targets": ("0",), "rank": 3}
importances = st.lists(st.floats(1e-6, 1e6), min_size=9, max_size=9).map(torch.tensor)


def test_constant_information_is_a_plain_svd() -> None:
    weight = model()[0].weight.detach().double()
    down, up = decompose(weight).factors(weight, 3)
    for damping in (0.0, 1.0):
        for constant in (1e-12, 1.0, 3e4):
            found = product(FWSVD(damping=damping, **ONLY), known(torch.full((9,), constant)))
            assert torch.allclose(found.double(), up @ down, atol=1e-6)


@given(importances)
def test_undamped_it_is_the_papers_formula(importance: Tensor) -> None:
    """A = D^-1 U_r S_r, B = V_r^T of the SVD of D W, where W [in, out] and D = diag(sqrt(I))."""
    weight = model()[0].weight.detach().double().T
    scale = importance.double().sqrt()[:, None]
    u, s, v = torch.linalg.svd(scale * weight, full_matrices=False)
    paper = (u[:, :3] * s[:3] / scale) @ v[:3]
    found = product(FWSVD(damping=0.0, **ONLY), known(importance))
    gap = (scale * (found.double().T - paper)).norm() / (scale * weight).norm()
    assert gap < 1e-6


@given(importances, st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from([1e-9, 7.0, 1e9]))
def test_the_scale_of_the_information_changes_nothing(
    importance: Tensor, damping: float, factor: float
) -> None:
    value = FWSVD(damping=damping, **ONLY)
    one, other = product(value, known(importance)), product(value, known(importance * factor))
    assert torch.allclose(one, other, atol=1e-5)


def test_damping_goes_from_the_paper_to_a_plain_svd() -> None:
    importance = torch.tensor([1e-4, 1.0, 50.0, 2.0, 0.0, 1.0, 1.0, 9.0, 0.1])
    calibration = known(importance)
    layer = DenseLayer("0", 9, 12)
    metric = FWSVD(damping=1.0).metric(layer, calibration)
    assert torch.allclose(metric, importance.double() / importance.double().mean() + 1.0)
    plain = product(FWSVD(damping=0.0, **ONLY), known(torch.ones(9)))
    gaps = [
        (product(FWSVD(damping=damping, **ONLY), calibration) - plain).norm().item()
        for damping in (0.0, 0.3, 1.0, 100.0, 1e6)
    ]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 1e-3 < gaps[0]


def test_features_that_are_never_there_may_be_anything() -> None:
    """Importance is of input features: a constant zero input has none, and outputs do not care."""
    data = [(x.clone().index_fill_(1, torch.tensor([2, 5]), 0.0), y) for x, y in batches()]
    of = model()
    with torch.no_grad():
        of[0].weight[:, [2, 5]] = 1e4  # a plain SVD would keep little else
    calibration = calibrate(of, data, loss, layers=["0"])
    importance = calibration.mean("fisher", "0")
    assert importance[[2, 5]].tolist() == [0.0, 0.0]
    assert importance.count_nonzero() == 7
    x, weight = data[0][0], of[0].weight.detach().clone()
    before = of[0](x)
    FWSVD(damping=0.0, targets=("0",), rank=4).fit(of, calibration)
    assert of[0].down.isfinite().all()
    other = model()  # with other numbers in those columns
    FWSVD(damping=0.0, targets=("0",), rank=4).fit(other, calibration)
    assert torch.allclose(other[0](x), of[0](x), atol=1e-4)
    fisher = (of[0](x) - before).norm() / before.norm()
    down, up = decompose(weight).factors(weight, 4)
    svd = (x.double() @ (up @ down).mT + of[0].bias - before).norm() / before.norm()
    assert fisher < 0.8 * svd


def test_a_layer_that_the_loss_ignores_is_decomposed_plainly() -> None:
    found = product(FWSVD(damping=0.0, **ONLY), known(torch.zeros(9)))
    assert torch.allclose(found, product(FWSVD(**ONLY), known(torch.ones(9))))


def test_biases_and_other_layers_stay_and_metadata_goes_along() -> None:
    of = model()
    bias, other = of[0].bias, of[2].weight
    describe_parameter(of[0].weight, ParameterMetadata(learning_rate_multiplier=3.0))
    FWSVD(**ONLY).fit(of, known(torch.rand(9)))
    assert of[0].bias is bias
    assert of[2].weight is other
    for factor in (of[0].down, of[0].up):
        assert metadata(factor).learning_rate_multiplier == 3.0
    assert metadata(of[0].bias).weight_decay_multiplier == 0.0


def test_both_fishers_come_from_one_pass_and_differ() -> None:
    of = nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 6))
    data = [(torch.randn(8, 5, 9), torch.randn(8, 5, 6)) for _ in range(2)]
    exact, tokens = FWSVD(fisher="examples"), FWSVD(fisher="tokens")
    both = calibrate(of, data, loss, statistics=exact.statistics + tokens.statistics)
    layer = DenseLayer("0", 9, 12)
    metrics = [value.metric(layer, both) for value in (exact, tokens)]
    assert not torch.allclose(*metrics, rtol=1e-2)
    with pytest.raises(InputError, match="did not note the token_fisher"):
        tokens.metric(layer, exact.calibrate(of, data, loss))


def test_it_looks_at_as_many_examples_as_it_says() -> None:
    assert FWSVD(examples=20).calibrate(model(), batches(), loss).examples == 32
    assert FWSVD().calibrate(model(), batches(), loss).examples == 48


def test_fields_are_checked() -> None:
    for wrong in (
        {"share": 1.0},
        {"share": 0.0},
        {"damping": -0.1},
        {"rank": 0},
        {"fisher": "all"},
    ):
        with pytest.raises(InputError):
            FWSVD(**wrong)
    assert FWSVD(targets=["0"]).targets == ("0",)


@given(st.integers(1, 300), st.integers(1, 300), st.floats(0.05, 0.95), st.integers(1, 40))
def test_the_plan_keeps_the_share_and_never_adds(
    ins: int, outs: int, share: float, rank: int
) -> None:
    layer = DenseLayer("x", ins, outs)
    by_share, by_rank = FWSVD(share=share), FWSVD(rank=rank)
    for value in (by_share, by_rank):
        planned = value.plan([layer]).get("x")
        assert (planned is None) == (value.trained(layer) == ins * outs)
        assert value.trained(layer) <= ins * outs
        ledger = value.ledger(CompressorQuery(layer, ModelQuery(2, 5)))
        assert ledger.bytes("weight") == 4 * (value.trained(layer) - ins * outs)
        assert (ledger == Ledger()) == (planned is None)
    if by_share.rank_of(layer) not in (None, 1):
        assert by_share.trained(layer) <= share * ins * outs
