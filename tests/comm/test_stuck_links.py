"""Which message does not come, on reports of ranks that stand in one after ordinary iterations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from message_network import SIZE, Network

from modicum.comm.anomalies import Anomaly, DiagnosisLimits
from modicum.comm.judging import Judge
from modicum.core.ranks.observed_calls import RECEIVE, SEND, link_name
from modicum.core.ranks.rank_reports import OpenCall, RankReport


def waiting(
    rank: int, kind: str, number: int, seconds: float, size: int = 0, **changed: Any
) -> RankReport:
    """A rank that is in a message of a ring of four since so many seconds."""
    (reports, *_) = Network(sums=False).iterations(1)
    link = ((rank - 1) % 4, rank) if kind == RECEIVE else (rank, (rank + 1) % 4)
    call = OpenCall(link_name("0", *link), number, kind, "", seconds, size)
    begun = {link_name("0", *one): number + 1 for one in (link, (rank, (rank + 1) % 4))}
    values = {"entered": begun, "open": (call,), "done": ()} | changed
    return replace(reports[rank], **values)


def test_a_rank_whose_message_others_wait_for_is_late() -> None:
    late = waiting(2, SEND, 29, 0.0, open=(), place="packing.py:88, batch")
    others = [waiting(rank, RECEIVE, 30, 41.0) for rank in (3, 0, 1)]
    judge = Judge(DiagnosisLimits())
    judge.add([*others, late], 0.0)
    (named,) = judge.look(0.0)
    assert (named.kind, named.rank, named.ends) == ("late", 2, False)
    assert named.sentence == (
        "rank 2 (host c) has not entered send 30 to rank 3; it is in packing.py:88, batch, "
        "since 41 s"
    )


def after_some(
    *reports: RankReport,
    ticks: int = 120,
    changed: Callable[[list[RankReport]], list[RankReport]] = list,
) -> list[tuple[float, Anomaly]]:
    """What is said of reports that stay as they are, after ordinary iterations."""
    judge, found = Judge(DiagnosisLimits()), []
    for number, each in enumerate(Network(sums=False).iterations(40)):
        judge.add(changed(each), number * 0.2)
        assert judge.look(number * 0.2) == []
    for tick in range(ticks):
        now = 8.0 + tick * 0.1
        judge.add(reports, now)
        found += [(now - 8.0, one) for one in judge.look(now)]
    return found


def test_a_message_that_never_comes_though_both_ends_are_there_ends_the_run() -> None:
    stands = [waiting(rank, RECEIVE, 120, 1.0) for rank in (2,)]
    others = [waiting(rank, SEND, 120, 1.0, open=()) for rank in (0, 1, 3)]
    ((after, named),) = after_some(*stands, *others)
    assert (named.kind, named.rank, named.peer, named.ends) == ("stuck link", 1, 2, True)
    assert 8.0 <= after <= 8.2
    assert named.sentence == (
        "the link rank 1 (host b) -> rank 2 (host c) stands still since 8 s, in send 120 to rank 2"
    )


@pytest.mark.parametrize("times", [1, 20, 4000])
def test_a_larger_message_has_as_many_times_longer(times: int) -> None:
    """The longest before took some 0.03 s: 30 times that is less than the 8 s that are the least.

    A message of 20 times as many bytes has some 18 s, one of 4000 times as many an hour.
    """
    stands = waiting(2, RECEIVE, 120, 1.0)
    sends = waiting(1, SEND, 120, 0.0, times * SIZE)
    sends = replace(sends, open=(), unawaited=sends.open)
    others = [waiting(rank, SEND, 120, 1.0, open=()) for rank in (0, 3)]
    found = after_some(stands, sends, *others, ticks=600)
    assert [(one.kind, one.ends) for _, one in found] == [("stuck link", True)] * (times < 4000)
    for after, _ in found:
        assert (8.0 <= after <= 8.2) if times == 1 else (10.0 < after < 59.0)


def test_a_message_of_which_no_end_says_the_bytes_ends_no_run() -> None:
    """Where those before were of several sizes."""
    sizes = iter(range(10**6))

    def of_two(reports: list[RankReport]) -> list[RankReport]:
        size = SIZE * (1 + next(sizes) % 2)
        return [
            replace(one, done=tuple(replace(c, bytes=c.bytes and size) for c in one.done))
            for one in reports
        ]

    stands = waiting(2, RECEIVE, 120, 1.0)
    others = [waiting(rank, SEND, 120, 1.0, open=()) for rank in (0, 1, 3)]
    ((after, named),) = after_some(stands, *others, changed=of_two)
    assert (named.kind, named.rank, named.peer, named.ends) == ("stuck link", 1, 2, False)
    assert 8.0 <= after <= 8.2
    assert named.sentence.endswith(
        "stands still since 8 s, in send 120 to rank 2 (its bytes are not known, so the run is not "
        "ended)"
    )


def test_messages_do_not_stand_still_while_nobody_looks() -> None:
    stands = [waiting(2, RECEIVE, 120, 1.0)]
    stands += [waiting(rank, SEND, 120, 1.0, open=()) for rank in (0, 1, 3)]
    judge = Judge(DiagnosisLimits())
    for number, each in enumerate(Network(sums=False).iterations(40)):
        judge.add(each, number * 0.2)
        assert judge.look(number * 0.2) == []
    judge.add(stands, 8.0)
    assert judge.look(8.0) == []
    judge.resumed(28.0)  # it was stopped, and so was nothing else
    for now in (28.0, 35.0):
        judge.add(stands, now)
        assert judge.look(now) == []
    judge.add(stands, 36.5)
    assert [one.kind for one in judge.look(36.5)] == ["stuck link"]


def test_two_links_of_a_rank_that_stand_still_are_its_port() -> None:
    stands = [waiting(rank, RECEIVE, 120, 1.0) for rank in (2, 3)]
    others = [waiting(rank, SEND, 120, 1.0, open=()) for rank in (0, 1)]
    ((_, named),) = after_some(*stands, *others)
    assert (named.kind, named.rank, named.ends) == ("stuck port", 2, True)
    assert named.sentence.startswith("the port of rank 2 (host c) stands still since 8 s, in send")


def test_a_message_that_its_sender_has_not_begun_does_not_stand_still() -> None:
    stands = waiting(2, RECEIVE, 120, 1.0)
    others = [waiting(rank, SEND, 119, 1.0, open=()) for rank in (0, 1, 3)]
    assert after_some(stands, *others) == []
    stopped = [replace(one, process="stopped", process_seconds=1.0) for one in others[1:2]]
    assert "stuck link" not in {one.kind for _, one in after_some(stands, *stopped)}


def test_a_message_between_ranks_of_which_a_debugger_holds_one_does_not_stand_still() -> None:
    """No thread of that one gives a sign, and its process counts as running."""
    waits = waiting(2, RECEIVE, 120, 1.0)
    others = [waiting(rank, SEND, 120, 1.0, open=()) for rank in (0, 1, 3)]
    assert after_some(replace(waits, beat_seconds=9.0), *others) == []
    others[1] = replace(others[1], beat_seconds=9.0)
    assert after_some(waits, *others) == []


def test_a_message_of_a_group_of_four_is_none() -> None:
    (reports, *_) = Network().iterations(1)
    call = OpenCall("0", 3, RECEIVE, "", 50.0)
    spoilt = replace(reports[2], open=(call,), done=(replace(reports[2].done[0], group="0"),))
    judge = Judge(DiagnosisLimits())
    for now in (0.0, 5.0, 9.0):
        judge.add([*reports[:2], spoilt, reports[3]], now)
        assert {one.kind for one in judge.look(now)} <= {"late"}
