"""Shaped links are tried before they are believed; what a full proof says of steps on links."""

from __future__ import annotations

from typing import Any

import pytest

from modicum.core.contracts.catalog import find
from modicum.core.errors import InputError
from modicum.proofs.base import ProofRun
from modicum.proofs.comm import bounded_curve
from modicum.proofs.comm.links import burst_for
from modicum.proofs.comm.step_bounds import World

RATES, MESSAGE = {1.0: 2.5e6, 3.0: 1.0e6}, 200_000
QUICK = World(ranks=2, layers=4, width=256, compute=0.2, low_rank=4, steps=1, repeats=2)


@pytest.mark.parametrize(
    ("off", "believed"), [(1.1, True), (0.9, True), (1.2, False), (0.5, False)]
)
def test_a_link_that_is_not_its_rate_is_refused(
    monkeypatch: pytest.MonkeyPatch, off: float, believed: bool
) -> None:
    asked = []

    def shaped(ranks: int, rates: list[str], function: str, *_: Any, **more: Any) -> list[Any]:
        asked.append(function)
        assert rates == ["20000kbit", "8000kbit"]
        assert more["bursts"] == [burst_for(rate, MESSAGE) for rate in RATES.values()]
        exact, wrong = (MESSAGE / rate for rate in RATES.values())
        return [exact, off * wrong] if function == bounded_curve.COLD else [{"of": 1}, {"of": 3}]

    monkeypatch.setattr(bounded_curve, "shaped", shaped)
    monkeypatch.setattr(bounded_curve, "judged_all", lambda world, found: found)
    if believed:
        found, part = bounded_curve.on_shaped_links(QUICK, RATES, MESSAGE)
        assert found == {1.0: {"of": 1}, 3.0: {"of": 3}}
        assert part == {1.0: pytest.approx(0.0), 3.0: pytest.approx(off - 1)}
        assert asked == [bounded_curve.COLD, bounded_curve.BENCH]
    else:
        with pytest.raises(InputError, match=r"a cold message takes .* of its bytes' time"):
            bounded_curve.on_shaped_links(QUICK, RATES, MESSAGE)
        assert asked == [bounded_curve.COLD]


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
