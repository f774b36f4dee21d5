"""The proof of MKOR, part by part; of times nothing is asserted: other tests run beside these."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from modicum.core.contracts.catalog import find
from modicum.proofs.base import ProofRun
from modicum.proofs.optim import mkor
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
