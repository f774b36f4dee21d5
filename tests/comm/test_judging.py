"""The judge on made-up reports, of which the culprit is known."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from modicum.comm.anomalies import Anomaly, DiagnosisLimits
from modicum.comm.judging import Judge
from modicum.core.ranks.call_ring import BEREFT, ENDED, FAILED
from modicum.core.ranks.rank_reports import DoneCall, OpenCall, RankReport

RANKS = 4


def report(rank: int, calls: int = 0, **changed: Any) -> RankReport:
    plain = RankReport(
        rank=rank, host="ab"[rank // 2], process="running", process_seconds=0.0, beat_seconds=0.1,
        starved=0.0, left=0, words="", marked=False, place="packing.py:88, batch",
        entered={"0": calls}, members={"0": tuple(range(RANKS))}, open=(), done=(),
    )  # fmt: skip
    return replace(plain, **changed)


def opened(sequence: int, seconds: float) -> tuple[OpenCall, ...]:
    return (OpenCall("0", sequence, "all-gather", "layers.17", seconds),)


def judged(*reports: RankReport, now: float = 1.0) -> list[Anomaly]:
    judge = Judge(DiagnosisLimits())
    judge.add(reports, 0.0)
    return judge.look(now)


def iterations(
    slow: dict[int, float],
    count: int,
    *,
    seed: int = 0,
    jitter: float = 0.03,
    calls: int = 3,
    offsets: tuple[float, ...] = (0.0,) * RANKS,
    marked: bool = False,
    begins: int = 0,
    compute: float = 0.04,
) -> Iterator[list[RankReport]]:
    """Iterations of so many collectives, each after compute; some ranks are slower from one on."""
    draws = random.Random(seed)
    end = 0.0
    for number in range(count * calls):
        slower = slow if number >= begins * calls else {}
        took = [
            compute * (1 + slower.get(rank, 0.0)) * (1 + draws.gauss(0, jitter))
            for rank in range(RANKS)
        ]
        starts = [end + seconds for seconds in took]
        end = max(starts) + 0.002
        yield [
            report(
                rank,
                number + 1,
                done=(
                    DoneCall(
                        "0", number, "all-reduce", "", 100 + number % calls, end - start,
                        end + offsets[rank], marked,
                    ),
                ),
            )
            for rank, start in enumerate(starts)
        ]  # fmt: skip


def found(stream: Iterator[list[RankReport]]) -> list[tuple[int, Anomaly]]:
    judge, anomalies = Judge(DiagnosisLimits()), []
    for number, reports in enumerate(stream):
        judge.add(reports, number * 0.01)
        anomalies += [(number, one) for one in judge.look(number * 0.01)]
    return anomalies


@pytest.mark.parametrize("percent", [10, 20, 30, 50, 100])
def test_a_rank_that_becomes_slow_is_named_and_no_other(percent: int) -> None:
    right, latencies = 0, []
    for seed in range(40):
        culprit, begins = seed % RANKS, 40 + seed % 7
        named = found(iterations({culprit: percent / 100}, 80, seed=seed, begins=begins))
        assert {one.kind for _, one in named} <= {"slow"}
        right += {one.rank for _, one in named} == {culprit}
        latencies += [(number + 1) / 3 - begins for number, _ in named[:1]]
    assert right >= 38
    assert min(latencies) >= 6
    assert sorted(latencies)[len(latencies) // 2] <= 10  # iterations


@pytest.mark.parametrize("percent", [10, 30, 100])
def test_a_rank_that_was_slow_from_the_beginning_is_named_too(percent: int) -> None:
    right = 0
    for seed in range(40):
        named = found(iterations({seed % RANKS: percent / 100}, 40, seed=seed))
        right += [one.rank for _, one in named] == [seed % RANKS]
    assert right >= 38


@pytest.mark.parametrize("jitter", [0.03, 0.1, 0.3])
def test_without_a_slow_rank_nobody_is_named(jitter: float) -> None:
    for seed in range(20):
        assert found(iterations({}, 400, seed=seed, jitter=jitter)) == []


def test_what_lasts_shorter_than_other_programs_disturb_names_nobody() -> None:
    quick = iterations({1: 0.5}, 52, begins=40, compute=0.01)  # 12 iterations, half a second
    assert found(quick) == []
    assert [one.rank for _, one in found(iterations({1: 0.5}, 80, begins=40, compute=0.01))] == [1]


def test_clocks_are_not_compared() -> None:
    plain = found(iterations({2: 0.3}, 30))
    off = found(iterations({2: 0.3}, 30, offsets=(10.0, -10.0, 3.0, 0.0)))
    assert [(at, one.rank, one.kind) for at, one in off] == [
        (at, one.rank, one.kind) for at, one in plain
    ]
    assert [one.rank for _, one in plain] == [2]
    assert [one.share for _, one in off] == pytest.approx([one.share for _, one in plain])


def test_iterations_are_found_again_after_others_that_are_no_steps() -> None:
    """Calls of another kind, as an evaluation makes them, neither hide nor name a rank."""
    stream, evaluated = list(iterations({2: 0.3}, 100, begins=60)), []
    for number, reports in enumerate(stream):
        changed = number // 60 % 2 == 0 and number % 60 < 9
        evaluated += [[changing(one, "evaluates", 7) if changed else one for one in reports]]
    assert [one.rank for _, one in found(iter(evaluated))] == [2]
    assert found(iter(evaluated[:180])) == []


def changing(one: RankReport, label: str, size: int) -> RankReport:
    (call,) = one.done
    return replace(one, done=(replace(call, label=label, bytes=size, marked=True),))


def test_marked_iterations_and_one_long_pause_name_nobody() -> None:
    assert found(iterations({1: 1.0}, 30, marked=True)) == []
    calm, pause = list(iterations({}, 60)), list(iterations({1: 30.0}, 60))
    assert found(iter([*calm[:100], pause[100], *calm[101:]])) == []


def test_iterations_that_took_next_to_no_time_are_no_error() -> None:
    """As a rank may say; the agent that judges would end, and nobody would look any more."""
    calls = [
        DoneCall("0", number, "all-reduce", "", 8, 0.0, number * 1e-310, marked=False)
        for number in range(60)
    ]
    stream = ([report(rank, 60, done=(call,)) for rank in range(RANKS)] for call in calls)
    assert found(stream) == []


def test_a_rank_that_is_fast_again_may_be_named_again() -> None:
    slow, calm = list(iterations({3: 0.5}, 150)), list(iterations({}, 150))
    named = found(iter([*slow[:120], *calm[120:300], *slow[300:]]))
    assert [one.rank for _, one in named] == [3, 3]


def test_that_a_slow_rank_has_no_processor_is_said_and_once() -> None:
    slow, calm = list(iterations({3: 0.5}, 150)), list(iterations({}, 150))
    stream = [*slow[:120], *calm[120:300], *slow[300:]]

    def starving(most: float, least: float) -> list[Anomaly]:
        each = {rank: most if rank == 3 else least for rank in range(RANKS)}
        changed = ([replace(one, starved=each[one.rank]) for one in reports] for reports in stream)
        return [one for _, one in found(changed)]

    (once,) = starving(0.55, 0.25)
    assert (once.kind, once.rank, once.ends) == ("slow", 3, False)
    assert "other programs have its processor 55% of the time, those of the others 25%" in once.note
    assert once.sentence.endswith("it is not named for that again)")
    # Where all want for processors alike, that is not why one of them is slow.
    assert [(one.rank, one.note) for one in starving(0.55, 0.55)] == [(3, "")] * 2


def test_a_late_rank_is_named_with_collective_place_and_time() -> None:
    waiting = [report(rank, 5125, open=opened(5124, 41.0)) for rank in (0, 1, 2)]
    (late,) = judged(*waiting, report(3, 5124), now=0.0)
    assert not late.ends
    assert late.sentence == (
        "rank 3 (host b) has not entered all-gather 5124 of layers.17; "
        "it is in packing.py:88, batch, since 41 s"
    )
    judge = Judge(DiagnosisLimits())
    judge.add([*waiting, report(3, 5124)], 0.0)
    assert len(judge.look(0.0)) == 1
    assert judge.look(5.0) == []  # once


@pytest.mark.parametrize(
    "changed", [{"marked": True}, {"beat_seconds": 41.0}, {"open": opened(3, 40.0)}]
)
def test_who_evaluates_holds_the_lock_or_waits_itself_has_more_time(changed: Any) -> None:
    waiting = [report(rank, 5125, open=opened(5124, 120.0)) for rank in (0, 1, 2)]
    late = report(3, 5124, **changed)
    assert judged(*waiting, late, now=0.0) == []
    if "open" not in changed:
        longer = [replace(one, open=opened(5124, 160.0)) for one in waiting]
        assert [one.rank for one in judged(*longer, late, now=0.0)] == [3]


def in_call(group: str, sequence: int, kind: str = "all-reduce") -> tuple[OpenCall, ...]:
    return (OpenCall(group, sequence, kind, "", 41.0),)


@pytest.mark.parametrize("barrier", [0, 3])
def test_ranks_that_are_in_different_calls_of_one_number_are_named(barrier: int) -> None:
    reports = [
        report(rank, 51, open=in_call("0", 50, "barrier" if rank == barrier else "all-reduce"))
        for rank in range(RANKS)
    ]
    judge = Judge(DiagnosisLimits())
    judge.add(reports, 0.0)
    (named,) = judge.look(0.0)
    assert (named.kind, named.rank, named.ends) == ("apart", barrier, False)
    hosts, other = "aabb", 2 if barrier == 3 else 3
    assert named.sentence == (
        f"rank {barrier} (host {hosts[barrier]}) is in barrier 50 and rank {other} (host b) in "
        "all-reduce 50, since 41 s: these never end; it was last seen in packing.py:88, batch"
    )
    assert judge.look(5.0) == []  # once
    young = [replace(one, open=(replace(one.open[0], seconds=5.0),)) for one in reports]
    assert judged(*young, now=0.0) == []


def test_where_as_many_are_in_either_call_two_that_differ_are_named() -> None:
    kinds = ("barrier", "all-reduce", "all-reduce", "barrier")
    reports = [report(rank, 51, open=in_call("0", 50, kind)) for rank, kind in enumerate(kinds)]
    (named,) = judged(*reports, now=0.0)
    assert (named.rank, named.collective) == (1, "all-reduce 50")
    assert (named.peer, named.peer_collective) == (3, "barrier 50")


def of_pairs(rank: int, group: str, sequence: int) -> RankReport:
    """A rank that is in a call of one of the groups of ranks 0 and 1, 1 and 2, 2 and 0."""
    members = {"a": (0, 1), "b": (1, 2), "c": (0, 2)}
    own = {name: ranks for name, ranks in members.items() if rank in ranks}
    begun = dict.fromkeys(own, sequence) | {group: sequence + 1}
    return report(rank, entered=begun, members=own, open=in_call(group, sequence))


def test_ranks_that_wait_for_one_another_in_a_circle_are_named() -> None:
    # 0 waits for 1 in a, 1 for 2 in b, 2 for 0 in c.
    circle = [of_pairs(0, "a", 50), of_pairs(1, "b", 50), of_pairs(2, "c", 50)]
    named = judged(*circle, now=0.0)
    assert [(one.kind, one.ends) for one in named] == [("late", False)] * 3
    assert {one.rank for one in named} == {0, 1, 2}
    assert {one.note for one in named} == {
        "it waits in all-reduce 50, and in a circle others wait for it"
    }


def test_who_waits_for_one_who_waits_for_a_late_rank_is_not_named() -> None:
    late = report(2, entered={"b": 50, "c": 50}, members={"b": (1, 2), "c": (0, 2)})
    (named,) = judged(of_pairs(0, "a", 50), of_pairs(1, "b", 50), late, now=0.0)
    assert (named.kind, named.rank, named.note) == ("late", 2, "")


def test_a_stopped_rank_is_named_and_later_ends_the_run() -> None:
    waiting = [report(rank, 51, open=opened(50, 1.0)) for rank in (0, 1, 2)]
    stopped = report(3, 50, process="stopped", process_seconds=1.0)
    judge = Judge(DiagnosisLimits())
    judge.add([*waiting, stopped], 0.0)
    assert judge.look(0.0) == []
    (named,) = judge.look(1.0)
    assert (named.kind, named.rank, named.ends, named.inside) == ("stopped", 3, False, False)
    assert named.collective == "all-gather 50 of layers.17"
    judge.add([*waiting, replace(stopped, process_seconds=7.5)], 7.0)
    (ended,) = judge.look(7.6)
    assert (ended.kind, ended.rank, ended.ends) == ("stopped", 3, True)
    assert judge.look(9.0) == []


def test_who_stops_all_ranks_at_once_ends_no_run() -> None:
    stopped = [report(rank, process="stopped", process_seconds=20.0) for rank in range(RANKS)]
    assert judged(*stopped, now=0.0) == []


def resuming(silent_seconds: float, *running: RankReport) -> Callable[[float], list[Anomaly]]:
    """All ranks are stopped for 60 s until 0.0, then these run: what is found after so long."""
    judge = Judge(DiagnosisLimits(silent_seconds=silent_seconds))
    stopped = [report(rank, 51, process="stopped", process_seconds=60.0) for rank in range(RANKS)]
    judge.add(stopped, 0.0)
    assert judge.look(0.0) == []

    def look(now: float) -> list[Anomaly]:
        judge.add([replace(one, process_seconds=60.0 + now) for one in stopped], now)
        judge.add([replace(one, open=opened(50, 60.0 + now)) for one in running[:3]], now)
        judge.add(running[3:], now)
        return judge.look(now)

    return look


def test_who_resumes_ranks_one_after_another_has_time_for_it() -> None:
    look = resuming(8.0, report(0, 51))
    assert look(0.1) == look(1.4) == []
    assert [(one.kind, one.rank, one.ends) for one in look(1.6)] == [
        ("stopped", rank, False) for rank in (1, 2, 3)
    ]
    assert look(7.9) == []
    (ended,) = look(8.1)
    assert (ended.kind, ended.ends) == ("stopped", True)
    assert ended.seconds == pytest.approx(8.1)


def test_nobody_is_late_by_the_time_for_which_all_were_stopped() -> None:
    look = resuming(8.0, *(report(rank, 51) for rank in (0, 1, 2)), report(3, 50))
    assert look(0.1) == look(29.9) == []
    (named,) = look(30.1)
    assert (named.kind, named.rank, named.ends) == ("late", 3, False)
    assert named.seconds == pytest.approx(30.1)


def test_stopped_in_a_collective() -> None:
    inside = {"process": "stopped", "process_seconds": 2.0, "open": opened(50, 2.0)}
    waiting = [report(rank, 51, open=opened(50, 2.0)) for rank in (0, 1, 2)]
    (named,) = judged(*waiting, report(3, 51, **inside), now=0.0)
    assert (named.rank, named.inside) == (3, True)
    assert named.sentence.startswith("rank 3 (host b) is stopped since 2 s, in all-gather 50")


def test_a_call_that_has_ended_elsewhere_is_one_that_nobody_is_in() -> None:
    stopped = report(3, 51, process="stopped", process_seconds=2.0, open=opened(50, 2.0))
    ended = DoneCall("0", 50, "all-gather", "layers.17", 8, 0.1, 1.0, False)
    waiting = replace(report(0, 52, open=opened(51, 2.0)), done=(ended,))
    (named,) = judged(waiting, stopped, now=0.0)
    assert (named.inside, named.collective) == (False, "all-gather 51 of layers.17")


def test_the_first_that_died_is_named_and_ends_the_run() -> None:
    dead = [report(rank, process="dead", process_seconds=(0.2, 0.5)[rank]) for rank in (0, 1)]
    bereft = [report(2, process="dead", left=BEREFT), report(3, process="dead", left=ENDED)]
    (named,) = judged(*dead, *bereft)
    assert (named.kind, named.rank, named.ends) == ("dead", 1, True)


def test_a_failed_rank_is_named_with_its_words() -> None:
    (named,) = judged(report(0), report(1, left=FAILED, words="ValueError: no such row"))
    assert named.sentence.startswith("rank 1 (host a) has failed")
    assert named.sentence.endswith("(ValueError: no such row)")


def test_a_host_that_says_nothing_is_named() -> None:
    judge = Judge(DiagnosisLimits())
    judge.add([report(rank) for rank in range(RANKS)], 0.0)
    judge.add([report(0), report(1)], 8.0)
    (named,) = judge.look(8.5)
    assert (named.kind, named.rank, named.ends) == ("silent", 2, True)


def test_of_two_hosts_either_end_of_the_link_may_be_at_fault() -> None:
    judge = Judge(DiagnosisLimits())
    judge.add([report(rank) for rank in range(RANKS)], 0.0)
    judge.add([report(0), report(1)], 8.0)
    (named,) = judge.look(8.5)
    assert named.sentence.endswith("(it may be this host's own link that is down)")


@pytest.mark.parametrize("apart", [0.0, 0.5])
def test_a_host_that_hears_of_no_other_is_isolated_itself(apart: float) -> None:
    judge = Judge(DiagnosisLimits())
    hosts = [replace(report(rank), host="abcd"[rank]) for rank in range(RANKS)]
    judge.add(hosts, 0.0)
    judge.add(hosts[2:], apart)
    judge.add(hosts[:1], 8.0)
    (named,) = judge.look(8.2)
    assert (named.kind, named.rank, named.ends) == ("isolated", 0, True)
    assert named.sentence.startswith("rank 0 (host a) hears nothing of any other host since 8 s")


def test_of_several_hosts_the_one_that_is_silent_is_named() -> None:
    judge = Judge(DiagnosisLimits())
    hosts = [replace(report(rank), host="abcd"[rank]) for rank in range(RANKS)]
    judge.add(hosts, 0.0)
    judge.add([hosts[0], hosts[1], hosts[3]], 8.0)
    (named,) = judge.look(8.2)
    assert (named.kind, named.rank, named.note) == ("silent", 2, "")


def test_nothing_is_wrong_when_all_end_in_order() -> None:
    gone = [report(rank, process="dead", process_seconds=9.0, left=ENDED) for rank in range(4)]
    assert judged(*gone, now=100.0) == []
    waiting = report(0, 10, open=opened(9, 2.0))
    (named,) = judged(waiting, report(1, 9, process="dead", left=ENDED), now=0.0)
    assert named.sentence.startswith("rank 1 (host a) has ended, and others wait for it since 2 s")


def test_who_lives_and_closed_its_watch_may_come_later() -> None:
    waiting = report(0, 10, open=opened(9, 100.0))
    assert judged(waiting, report(1, 9, left=ENDED), now=0.0) == []


def test_who_ended_in_order_waits_for_nobody() -> None:
    ended = report(0, 10, left=ENDED, open=opened(9, 100.0))
    assert judged(ended, report(1, 9, process="dead", left=ENDED), now=0.0) == []
