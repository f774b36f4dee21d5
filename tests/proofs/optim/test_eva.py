"""The proof of Eva, part by part; of times nothing is asserted: other tests run beside these."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from modicum.core.contracts.catalog import find
from modicum.proofs.base import ProofRun
from modicum.proofs.optim import eva
from modicum.proofs.proof import Proof


def proof_of(part: Callable[[ProofRun], None], *, null: bool) -> Proof:
    run = ProofRun(find("eva"), null=null, full=False)
    part(run)
    return run.conclude()


def test_layers_are_those_of_a_resnet_20() -> None:
    weights = [p for p in eva.resnet().parameters() if p.ndim > 1]
    assert len(weights) == 20
    assert sum(p.numel() for p in weights) == 268_336  # He et al. 2016: 0.27 million


@pytest.mark.expensive
def test_memory_is_the_formulas_and_kfacs_is_noticed() -> None:
    assert all(criterion.passed for criterion in proof_of(eva.memory, null=False).criteria)
    assert not any(criterion.passed for criterion in proof_of(eva.memory, null=True).criteria)


@pytest.mark.expensive
@pytest.mark.parametrize("null", [False, True])
def test_passes_are_timed(null: bool) -> None:
    proof = proof_of(eva.speed, null=null)
    assert len(proof.criteria) == 2
    assert all(0 < criterion.figure < math.inf for criterion in proof.criteria)
