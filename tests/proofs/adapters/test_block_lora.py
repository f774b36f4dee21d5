from __future__ import annotations

from dataclasses import replace

import pytest

from modicum.core.contracts.catalog import find
from modicum.proofs.adapters import block_lora as home
from modicum.proofs.adapters import few_shot_bench, permutation_bench
from modicum.proofs.base import ProofRun
from modicum.proofs.bench import sweep
from modicum.proofs.proof import Proof

TINY = replace(permutation_bench.QUICK, symbols=8, tokens=8, width=16, mlp_width=32)
TINY = replace(TINY, pretraining_steps=20, steps=10)


def proof_of(monkeypatch: pytest.MonkeyPatch, *, null: bool, full: bool = False) -> Proof:
    pytest.importorskip("sklearn")
    for size in ("QUICK", "FULL"):
        monkeypatch.setattr(permutation_bench, size, TINY)
    monkeypatch.setattr(few_shot_bench, "PRETRAINING_STEPS", 10)
    monkeypatch.setattr(few_shot_bench, "STEPS", 2)
    monkeypatch.setattr(home, "SHOTS", (1, 16))
    monkeypatch.setattr(sweep, "_FURTHER", 0)  # so small, no rate is good
    run = ProofRun(find("block_lora"), null=null, full=full)
    home.prove(run)
    return run.conclude()


@pytest.mark.expensive
@pytest.mark.parametrize("full", [False, True])
def test_it_is_compared_with_fewer_numbers_and_sum_is_shown(
    monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    proof = proof_of(monkeypatch, null=False, full=full)
    figures = {figure.name: figure for figure in proof.figures}
    assert figures["few shots, trained, against LoRA of rank 4"].method == 3648
    assert figures["few shots, trained, against LoRA of rank 2"].baseline == 2688
    assert figures["trained numbers, a layer 768 x 768"].ratio == 0.625
    assert figures["operations a position, a layer 768 x 768"].ratio == 0.625
    assert sum("`sum`" in name for name in figures) == (3 if full else 0)
    assert proof.seeds == tuple(range(10 if full else 3))


@pytest.mark.expensive
def test_all_nulls_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = proof_of(monkeypatch, null=True)
    assert len({criterion.null_is for criterion in proof.criteria}) == 3
    missed = [criterion.sentence for criterion in proof.criteria if not criterion.passed]
    assert {"trained numbers, of LoRA's", "operations a position, of LoRA's"} <= set(missed)
