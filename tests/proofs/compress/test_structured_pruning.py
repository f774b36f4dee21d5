from __future__ import annotations

import pytest

from modicum.core.contracts.catalog import find
from modicum.proofs.base import ProofRun
from modicum.proofs.compress import structured_pruning
from modicum.proofs.compress.recovery_bench import Code
from modicum.proofs.optim.text_bench import TextSize
from modicum.proofs.proof import Proof

TINY = TextSize(width=128, layers=1, mlp_width=32, tokens=16, rows=4, steps=20)


def shrunk(monkeypatch: pytest.MonkeyPatch, *, null: bool, full: bool = False) -> Proof:
    monkeypatch.setattr(structured_pruning, "QUICK", TINY)
    monkeypatch.setattr(structured_pruning, "FULL", TINY)
    monkeypatch.setattr(
        structured_pruning, "Code", lambda size, steps, rows, *which: Code(size, 3, 8, *which)
    )
    run = ProofRun(find("structured_pruning"), null=null, full=full)
    structured_pruning.prove(run)
    return run.conclude()


@pytest.mark.expensive
def test_random_units_in_its_place_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = shrunk(monkeypatch, null=True)
    assert proof.verdict == "does not hold"
    assert proof.undetected == ()
    *judged, against = proof.criteria
    assert [criterion.figure for criterion in judged] == [1.0] * 2
    assert against.rival == "magnitude at equal widths"


@pytest.mark.expensive
def test_the_full_experiment_has_every_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = shrunk(monkeypatch, null=False, full=True)
    assert proof.seeds == (0, 1, 2, 3, 4)
    assert len(proof.criteria) == 5
    names = " ".join(figure.name for figure in proof.figures)
    for word in ("at once, 25%", "recovered, 25%", "at once, 50%", "recovered, 50%", "magnitude"):
        assert word in names
