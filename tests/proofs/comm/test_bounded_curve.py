"""What a full proof says of steps at ratios of communication to computing."""

from __future__ import annotations

from typing import Any

import pytest

from modicum.core.contracts.catalog import find
from modicum.core.errors import InputError
from modicum.proofs.base import ProofRun
from modicum.proofs.comm import bounded_curve
from modicum.proofs.comm.step_bounds import World


@pytest.mark.ranks
def test_a_full_proof_holds_steps_against_the_methods_own_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And in a null run dense sums against them, whose bytes take longer."""

    def no_ports(*given: Any, **named: Any) -> Any:
        raise InputError("no ports here")

    monkeypatch.setattr(bounded_curve, "shaped", no_ports)
    world = World(ranks=2, layers=4, width=64, compute=0.05, rank=4, low_rank=4, steps=1, repeats=1)
    over = {}
    for null in (False, True):
        run = ProofRun(find("acp_sgd"), null=null, full=True)
        bounded_curve.over_its_bound(
            run, "acp_sgd", null="dense_fp32", null_is="dense sums", world=world
        )
        proof = run.conclude()
        over[null] = {each.sentence: each.figure for each in proof.criteria}
        assert len(over[null]) == len(proof.criteria) == 4
        assert all(each.bar == 1.25 for each in proof.criteria)
        assert len(proof.figures) >= 4
    at_ten = "communication 10 times computing: a step over its bound"
    assert over[True][at_ten] > 3 > over[False][at_ten] > 0.9
