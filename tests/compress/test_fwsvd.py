"""FWSVD against plain SVD, the paper's formula, and what the loss really depends on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from modicum.compress import FWSVD, Calibration, calibrate
from modicum.core.errors import InputError
from modicum.core.layers.factorize import decompose
from modicum.core.layers.layer_sites import Site
from modicum.core.layers.linear_forms import full_weight

LAYER = Site("0", "linear", 9, 12)
ONLY = {"targets": ("0",), "rank": 3}
importances = st.lists(st.floats(1e-6, 1e6), min_size=9, max_size=9).map(torch.tensor)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 6, bias=False))


def loss(of: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (of(batch[0]) - batch[1]).square().sum()


def known(importance: Tensor) -> Calibration:
    """A calibration that found this mean over one example."""
    return Calibration({("fisher", "0"): importance.double()}, 1, {"0": 1})


def product(value: FWSVD, calibration: Calibration) -> Tensor:
    of = model()
    value.fit(of, calibration)
    return full_weight(of[0]).detach().double()


def plain_svd(weight: Tensor, rank: int) -> Tensor:
    down, up = decompose(weight).factors(weight, rank)
    return up @ down


@pytest.mark.parametrize("damping", [0.0, 1.0])
@pytest.mark.parametrize("constant", [0.0, 1e-12, 1.0, 3e4])  # 0: the loss ignores the layer
def test_constant_information_is_a_plain_svd(damping: float, constant: float) -> None:
    found = product(FWSVD(damping=damping, **ONLY), known(torch.full((9,), constant)))
    assert torch.allclose(found, plain_svd(model()[0].weight, 3), atol=1e-6)


@given(importances)
def test_undamped_it_is_the_papers_formula(importance: Tensor) -> None:
    """A = D^-1 U_r S_r, B = V_r^T of the SVD of D W, where W [in, out] and D = diag(sqrt(I))."""
    weight = model()[0].weight.detach().double().T
    scale = importance.double().sqrt()[:, None]
    u, s, v = torch.linalg.svd(scale * weight, full_matrices=False)
    paper = (u[:, :3] * s[:3] / scale) @ v[:3]
    found = product(FWSVD(damping=0.0, **ONLY), known(importance))
    gap = (scale * (found.T - paper)).norm() / (scale * weight).norm()
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
    metric = FWSVD(damping=1.0).metric(LAYER, known(importance))
    assert torch.allclose(metric, importance.double() / importance.double().mean() + 1.0)
    plain = plain_svd(model()[0].weight, 3)
    gaps = [
        (product(FWSVD(damping=damping, **ONLY), known(importance)) - plain).norm().item()
        for damping in (0.0, 0.3, 1.0, 100.0, 1e6)
    ]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 1e-3 < gaps[0]


def test_features_that_are_never_there_may_be_anything() -> None:
    """Importance is of input features: a constant zero input has none, and outputs do not care."""
    x, y = torch.randn(2, 48, 9, generator=torch.Generator().manual_seed(0)).unbind()
    x[:, [2, 5]] = 0.0
    value, of, other = FWSVD(damping=0.0, targets=("0",), rank=4), model(), model()
    with torch.no_grad():
        of[0].weight[:, [2, 5]] = 1e4  # a plain SVD would keep little else
    calibration = calibrate(of, [(x, y[:, :6])], loss, layers=["0"])
    importance = calibration.mean("fisher", "0")
    assert (importance == 0).nonzero().flatten().tolist() == [2, 5]
    before, svd = of[0](x), x @ plain_svd(of[0].weight, 4).float().T + of[0].bias
    value.fit(of, calibration)
    value.fit(other, calibration)  # with other numbers in those columns
    assert of[0].down.isfinite().all()
    assert torch.allclose(other[0](x), of[0](x), atol=1e-4)
    assert (of[0](x) - before).norm() < 0.8 * (svd - before).norm()


def test_both_fishers_come_from_one_pass_and_differ() -> None:
    of = nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 6))
    data = [(torch.randn(8, 5, 9), torch.randn(8, 5, 6)) for _ in range(2)]
    exact, tokens = FWSVD(fisher="examples"), FWSVD(fisher="tokens")
    both = calibrate(of, data, loss, statistics=exact.statistics + tokens.statistics)
    metrics = [value.metric(LAYER, both) for value in (exact, tokens)]
    assert not torch.allclose(*metrics, rtol=1e-2)
    with pytest.raises(InputError, match="did not note the token_fisher"):
        tokens.metric(LAYER, exact.calibrate(of, data, loss))
