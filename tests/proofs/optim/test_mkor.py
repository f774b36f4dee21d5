"""The proof of MKOR, part by part; of times nothing is asserted: other tests run beside these."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch

from modicum.core.contracts.catalog import find
from modicum.optim.layer_factors import RankOneInverse
from modicum.proofs.base import ProofRun
from modicum.proofs.bench.meters import StepTimes
from modicum.proofs.optim import mkor
from modicum.proofs.optim.digits_curves import CurveRule, TrainingCurve
from modicum.proofs.optim.mkor import InverseByCholesky
from modicum.proofs.proof import Proof


def proof_of(part: Callable[[ProofRun], None], *, null: bool) -> Proof:
    run = ProofRun(find("mkor"), null=null, full=False)
    part(run)
    return run.conclude()


@pytest.mark.expensive
@pytest.mark.ranks
@pytest.mark.parametrize("null", [False, True])
def test_bytes_are_the_formulas_and_factors_on_the_wire_are_noticed(null: bool) -> None:
    vectors, others = proof_of(mkor.wire, null=null).criteria
    assert vectors.passed is not null
    assert others.passed


@pytest.mark.expensive
def test_refreshes_are_timed() -> None:
    (criterion,) = proof_of(mkor.refreshes, null=False).criteria
    assert 0 < criterion.figure < math.inf


def test_inverting_is_the_codes_form_to_roundings() -> None:
    quick, slow = (kind("code", 0.95, 2.0, 0.9) for kind in (RankOneInverse, InverseByCholesky))
    factors = [torch.eye(7).double() for _ in range(2)]
    for _ in range(12):
        vector = torch.randn(7).double()
        for rule, factor in zip((quick, slow), factors, strict=True):
            rule.take_up(factor, vector)
    torch.testing.assert_close(*factors, rtol=1e-12, atol=1e-12)


class Trained:
    """A task whose trainings are known: a rule's seconds, and its last loss."""

    known: ClassVar[dict[str, tuple[float, float]]] = {
        mkor.OFTEN.name: (1.0, 1.0),
        mkor.HYBRID.name: (0.9, 1.01),
        mkor.INVERTING.name: (1.5, 1.0),
        mkor.PLAIN.name: (0.5, 1.3),
    }

    def __init__(self) -> None:
        self.seconds = 0.0

    def ends(self, rule: CurveRule) -> list[float]:
        return [self.known[rule.name][1]] * 2

    def rate(self, rule: CurveRule) -> float:
        return 0.1

    def curve(self, rule: CurveRule, rate: float, seed: int) -> TrainingCurve:
        self.seconds, last = self.known[rule.name]
        return TrainingCurve(seed, (2.0, last))


@pytest.mark.parametrize("null", [False, True])
def test_a_null_misses_the_hybrids_time_and_its_loss(
    null: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Trained()

    def timed(steps: dict[str, Callable[[], object]], repeats: int) -> dict[str, StepTimes]:
        taken = {}
        for label, step in steps.items():
            step()
            taken[label] = StepTimes((task.seconds,))
        return taken

    monkeypatch.setattr(mkor, "in_turns", timed)
    run = ProofRun(find("mkor"), null=null, full=False)
    run.seeds = (0, 1)
    mkor.ends_early(run, task)  # type: ignore[arg-type]
    assert [criterion.passed for criterion in run.conclude().criteria] == [not null] * 2
