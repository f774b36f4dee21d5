"""What calls of updates say of a link, against times written out by hand."""

from __future__ import annotations

import math

import pytest

from modicum.core.machine.links import MeasuredLink
from modicum.core.ranks.observed_calls import AGREEMENT, ObservedCall
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.seen_link import UpdateCalls, seen_link

LINK = MeasuredLink(latency=0.001, rate=1e6, cpu=1e-9, ranks=4)


def call(begun: float, ended: float, sent: int = 6000, kind: str = "all-reduce") -> ObservedCall:
    return ObservedCall(0, kind, "0", (0, 1, 2, 3), "layers.1", sent, begun, begun, ended)


def test_calls_that_overlap_count_once_and_pauses_do_not() -> None:
    # Of 2 x 3 and 3 steps, 9000 bytes: 18 ms are to be expected, and 1.8 s of it came.
    calls = [call(10.0, 11.0), call(10.5, 11.5), call(13.0, 13.3, 3000, "all-gather")]
    seen = seen_link([calls], LINK, Ranks())
    assert seen is not None
    expected = 0.001 * (6 + 6 + 3) + 15000 / 1e6
    assert seen.busy == pytest.approx(1.8)
    assert seen.slower == pytest.approx(1.8 / expected)
    assert seen.link.rate == pytest.approx(15000 / (1.8 - 0.015), rel=1e-3)
    assert (seen.link.latency, seen.link.cpu, seen.link.ranks) == (0.001, 1e-9, 4)


def test_the_median_update_counts_and_those_that_have_not_ended_do_not() -> None:
    took = [0.012, 1.2, 0.12, math.nan, 0.12]
    updates = [[call(0.0, seconds)] for seconds in took]
    seen = seen_link(updates, LINK, Ranks())
    assert seen is not None
    assert seen.slower == pytest.approx(10.0)


def test_nothing_is_seen_where_nothing_travels() -> None:
    assert seen_link([], LINK, Ranks()) is None
    assert seen_link([[], [call(0.0, 1.0, sent=0)], [call(0.0, math.nan)]], LINK, Ranks()) is None


def test_calls_between_updates_agreements_and_other_links_are_left_out() -> None:
    kept = UpdateCalls(lambda members: members == (0, 1, 2, 3))
    kept.began(call(0.0, 1.0))
    kept.next_update()
    agreement, inside = call(0.0, 1.0), call(0.0, 1.0)
    agreement.label, inside.members = AGREEMENT, (0, 1)
    for each in (agreement, inside, call(0.0, 1.0)):
        kept.began(each)
    assert [len(calls) for calls in kept.updates] == [1]
