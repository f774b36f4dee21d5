"""Shaped links are tried before they are believed; what a full proof says of steps on links."""

from __future__ import annotations

from typing import Any

import pytest

from modicum.core.contracts.catalog import find
from modicum.core.errors import InputError
from modicum.proofs.base import ProofRun
from modicum.proofs.comm import bounded_curve, links
from modicum.proofs.comm.links import NoLinks, burst_for
from modicum.proofs.comm.step_bounds import World

RATES, MESSAGE = {1.0: 2.5e6, 3.0: 1.0e6}, 200_000
QUICK = World(ranks=2, layers=4, width=256, compute=0.2, low_rank=4, steps=1, repeats=2)


@pytest.mark.parametrize(
    ("off", "believed"), [(1.1, True), (0.9, True), (1.2, False), (0.5, False)]
)
def test_a_link_that_is_not_its_rate_is_refused(
    monkeypatch: pytest.MonkeyPatch, off: float, believed: bool
) -> None:
    asked: list[Any] = []

    def shaped(ranks: int, rates: list[str], function: str, *_: Any, **more: Any) -> list[Any]:
        asked.append(function)
        [said], rate = rates, RATES[[1.0, 3.0][rates == ["8000kbit"]]]
        assert said == {2.5e6: "20000kbit", 1.0e6: "8000kbit"}[rate]
        assert more["bursts"] == [burst_for(rate, MESSAGE)]
        part = off if rate == RATES[3.0] else 1.0
        return [part * MESSAGE / rate] if function == links.COLD else [{"of": said}]

    def settled() -> float:
        asked.append("settled")
        return 0.25

    monkeypatch.setattr(bounded_curve, "shaped", shaped)
    monkeypatch.setattr(links, "shaped", shaped)
    monkeypatch.setattr(bounded_curve, "judged_all", lambda world, found: found)
    series = ["settled", links.COLD, bounded_curve.BENCH]
    if believed:
        found, part = bounded_curve.on_shaped_links(QUICK, RATES, MESSAGE, settled=settled)
        assert found == {
            1.0: {"of": "20000kbit", "load": 0.25},
            3.0: {"of": "8000kbit", "load": 0.25},
        }
        assert part == {1.0: pytest.approx(0.0), 3.0: pytest.approx(off - 1)}
        assert asked == 2 * series
    else:
        with pytest.raises(InputError, match=r"a cold message takes .* of its bytes' time"):
            bounded_curve.on_shaped_links(QUICK, RATES, MESSAGE, settled=settled)
        assert asked == [*series, *series[:2]]


def test_messages_that_are_too_short_for_a_link_are_refused_before_anything_is_timed() -> None:
    def settled() -> float:
        raise AssertionError("a series began")

    with pytest.raises(InputError, match="more than a twentieth of the smallest message"):
        bounded_curve.on_shaped_links(QUICK, RATES, 60_000, settled=settled)


ROW = {"bytes": 8, "calls": 1, "step": 1.0, "bound": 1.0}
POINT = {"none": 1.0, "arms": {"dense_fp32": ROW, "powersgd": ROW}}


def criteria(monkeypatch: pytest.MonkeyPatch, shaped: Any) -> list[str]:
    """Sentences of a full proof on links of which the shaped ones are these, or an error."""

    def on_shaped_links(world: World, rates: dict[float, float], *_: Any, **named: Any) -> Any:
        if isinstance(shaped, Exception):
            raise shaped
        return dict.fromkeys(rates, shaped), {}

    monkeypatch.setattr(bounded_curve, "on_a_pretended_link", lambda *_, **named: POINT)
    monkeypatch.setattr(bounded_curve, "on_shaped_links", on_shaped_links)
    run = ProofRun(find("powersgd"), null=False, full=True)
    bounded_curve.over_its_bound(run, "powersgd", null="dense_fp32", null_is="dense sums")
    return [each.sentence for each in run.conclude().criteria]


def test_a_proof_says_which_links_were_pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    at = "communication {} times computing{}: a step over its bound"
    by_design = at.format(0.3, " (pretended link)")
    shaped = [at.format(ratio, "") for ratio in (1, 3, 10)]
    assert criteria(monkeypatch, POINT) == [by_design, *shaped]
    pretended = [at.format(ratio, " (pretended link)") for ratio in (1, 3, 10)]
    assert criteria(monkeypatch, NoLinks("no tc")) == [by_design, *pretended]


def test_a_link_that_fails_is_not_pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="rank 1 failed"):
        criteria(monkeypatch, InputError("rank 1 failed"))


@pytest.mark.ranks
def test_a_full_proof_holds_steps_against_the_methods_own_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And in a null run dense sums against them, whose bytes take longer."""

    def no_ports(*given: Any, **named: Any) -> Any:
        raise NoLinks("no ports here")

    monkeypatch.setattr(bounded_curve, "on_shaped_links", no_ports)
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
    at_ten = "communication 10 times computing (pretended link): a step over its bound"
    assert over[True][at_ten] > 3 > over[False][at_ten] > 0.9
