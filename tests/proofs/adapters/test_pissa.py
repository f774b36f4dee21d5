from __future__ import annotations

import pytest
import torch

from modicum.adapters import PiSSA
from modicum.core.contracts.catalog import find
from modicum.core.layers.linear_forms import linear_form
from modicum.core.random import normal_
from modicum.proofs.adapters import pissa as home
from modicum.proofs.adapters.pissa import loftq, plain, quantizes_better, reconstructed
from modicum.proofs.base import ProofRun
from modicum.proofs.proof import Proof


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home, "WIDTH", 160)


def quantization(*, null: bool) -> Proof:
    run = ProofRun(find("pissa"), null=null, full=False)
    quantizes_better(run)
    return run.conclude()


def test_quantizing_the_rest_loses_less_than_qlora_and_loftq() -> None:
    proof = quantization(null=False)
    assert proof.verdict == "holds", proof.reason
    assert len(proof.criteria) == 4


def test_the_rivals_in_its_place_are_noticed() -> None:
    proof = quantization(null=True)
    assert proof.verdict == "does not hold"
    assert not any(criterion.passed for criterion in proof.criteria)
    assert [figure.ratio for figure in proof.figures] == pytest.approx([1.0] * 4)


def test_what_is_compared_is_what_it_says() -> None:
    weight = normal_(torch.empty(96, 128), seed=0, name="weight", std=0.1)
    ours = reconstructed(PiSSA(rank=8), weight)
    left, singular, right = torch.linalg.svd(weight, full_matrices=False)
    principal = left[:, :8] * singular[:8] @ right[:8]
    expected = principal + linear_form("nf4").round_trip(weight - principal)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    # LoftQ's update has the rank, and it loses less than nothing would.
    update = loftq(weight, 8) - linear_form("nf4").round_trip(weight)
    assert update.norm() > 0

    def lost(found: torch.Tensor) -> float:
        return (found - weight).norm().item()

    assert lost(loftq(weight, 8)) < lost(plain(weight, 8))
