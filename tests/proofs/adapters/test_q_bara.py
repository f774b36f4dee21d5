from __future__ import annotations

from dataclasses import replace

import pytest

from modicum.core.contracts.catalog import find
from modicum.proofs.adapters import permutation_bench
from modicum.proofs.adapters import q_bara as home
from modicum.proofs.base import ProofRun
from modicum.proofs.bench import sweep
from modicum.proofs.proof import Proof

TINY = replace(home.QUICK, symbols=8, tokens=8, width=16, mlp_width=32)
TINY = replace(TINY, pretraining_steps=20, steps=10)


def proof_of(monkeypatch: pytest.MonkeyPatch, *, null: bool, full: bool = False) -> Proof:
    monkeypatch.setattr(home, "QUICK", TINY)
    monkeypatch.setattr(home, "FEW_STEPS", 6)
    monkeypatch.setattr(permutation_bench, "FULL", TINY)
    monkeypatch.setattr(sweep, "_FURTHER", 0)  # so small, no rate is good
    run = ProofRun(find("q_bara"), null=null, full=full)
    home.prove(run)
    return run.conclude()


@pytest.mark.expensive
@pytest.mark.parametrize("full", [False, True])
def test_it_is_compared_at_equal_numbers_and_what_it_keeps_is_counted(
    monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    proof = proof_of(monkeypatch, null=False, full=full)
    figures = {figure.name: figure for figure in proof.figures}
    assert figures["trained parameters at 2 bits, rank 1"].ratio == 1.0
    assert figures["rank of the update"].ratio == 2.0
    assert figures["bytes kept of a layer's input"].ratio == 0.5
    assert ("loss above the floor at 3 bits, rank 1 (nats)" in figures) == full
    assert len({criterion.null_is for criterion in proof.criteria}) == (2 if full else 1)
    assert all(c.passed for c in proof.criteria if c.part == "check")


@pytest.mark.expensive
def test_its_null_does_not_have_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = proof_of(monkeypatch, null=True)
    missed = [criterion.sentence for criterion in proof.criteria if not criterion.passed]
    assert "rank of the update, of LoRA's" in missed
    assert "bytes kept of a layer's input, of LoRA's" in missed
