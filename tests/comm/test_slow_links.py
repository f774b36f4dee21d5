"""Which link is slow, on messages that were made up by the equations of who waits for whom."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from modicum.comm.anomalies import Anomaly, DiagnosisLimits
from modicum.comm.judging import Judge
from modicum.core.ranks.observed_calls import RECEIVE, SEND, link_name
from modicum.core.ranks.rank_reports import (
    DoneCall,
    OpenCall,
    RankReport,
    parse_reports,
    report_line,
)

SIZE = 262_144  # bytes of a message
COMPUTE, TRAVELS = 0.1, 0.02  # seconds
Link = tuple[int, int]


@dataclass
class Network:
    """Ranks that compute and then send messages, and when each of these begins and ends.

    A message travels once both ends stand there, as gloo's do. Its send has ended when it has come,
    or where the system holds it, as soon as both stand there.
    """

    ranks: int = 4
    slower: Mapping[Link, float] = field(default_factory=dict)
    computes: Mapping[int, float] = field(default_factory=dict)
    begins: int = 40
    buffered: bool = True
    sums: bool = True  # a sum over all ranks ends an iteration
    both_ways: bool = False
    all_pairs: bool = False
    overlapped: bool = False  # compute lies between the begin of a receive and the wait for it
    jitter: float = 0.03
    seed: int = 0
    offsets: Sequence[float] = (0.0,) * 8
    drift: float = 0.0  # of rank 1's clock
    again: int = 0  # the iteration in which the fault comes again, after 40 without it

    def links(self, step: int) -> list[Link]:
        if self.all_pairs:
            return [(r, (r + step + 1) % self.ranks) for r in range(self.ranks)]
        forward = [(r, (r + 1) % self.ranks) for r in range(self.ranks)]
        return forward + [(b, a) for a, b in forward] * self.both_ways

    def iterations(self, count: int) -> Iterator[list[RankReport]]:
        draws, now = random.Random(self.seed), [0.0] * self.ranks
        numbers = defaultdict[Link, int](int)
        for number in range(count):
            done = defaultdict[int, list[DoneCall]](list)
            faulty = number >= self.begins and not self.again - 40 <= number < self.again
            took = [
                COMPUTE
                * (1 + self.computes.get(rank, 0.0) * faulty)
                * (1 + draws.gauss(0, self.jitter))
                for rank in range(self.ranks)
            ]
            if not self.overlapped:
                now = [at + each for at, each in zip(now, took, strict=True)]
            for step in range(self.ranks - 1):
                begun, ended = list(now), defaultdict[int, list[tuple[str, Link, float]]](list)
                for link in self.links(step):
                    seconds = TRAVELS * (self.slower.get(link, 1.0) if faulty else 1.0)
                    seconds *= 1 + abs(draws.gauss(0, self.jitter))
                    both = max(begun[end] for end in link)
                    sent = both + (0.0005 if self.buffered else seconds)
                    ended[link[0]].append((SEND, link, sent))
                    ended[link[1]].append((RECEIVE, link, both + seconds))
                if self.overlapped and not step:
                    now = [at + each for at, each in zip(now, took, strict=True)]
                for rank in range(self.ranks):
                    for kind, link, when in sorted(ended[rank], key=lambda one: one[0] != SEND):
                        waited = max(0.0, when - now[rank])
                        now[rank] += waited
                        self._add(done[rank], kind, link, numbers[link], begun, now, waited, rank)
                for link in self.links(step):
                    numbers[link] += 1
            if self.sums:
                end = max(now) + 0.002
                for rank in range(self.ranks):
                    done[rank].append(
                        DoneCall("0", number, "all-reduce", "", 8, end - now[rank],
                                 self._clock(rank, end), False)
                    )  # fmt: skip
                now = [end] * self.ranks
            yield [self._report(rank, done[rank], number) for rank in range(self.ranks)]

    def _add(
        self, done: list[DoneCall], kind: str, link: Link, number: int, begun: Sequence[float],
        now: Sequence[float], waited: float, rank: int,
    ) -> None:  # fmt: skip
        begin, end = self._clock(rank, begun[rank]), self._clock(rank, now[rank])
        size = SIZE if kind == SEND else 0
        name = link_name("0", *link)
        done.append(DoneCall(name, number, kind, "", size, end - begin, end, False, waited))

    def _clock(self, rank: int, when: float) -> float:
        return when * (1 + self.drift * (rank == 1)) + self.offsets[rank]

    def _report(self, rank: int, done: list[DoneCall], number: int) -> RankReport:
        pairs = {link for step in range(self.ranks - 1) for link in self.links(step)}
        members = {link_name("0", *link): link for link in sorted(pairs) if rank in link}
        return RankReport(
            rank=rank, host="abcd"[rank], process="running", process_seconds=0.0, beat_seconds=0.1,
            starved=0.0, left=0, words="", marked=False, place="", entered={"0": number + 1},
            members={**members, "0": tuple(range(self.ranks))}, open=(), done=tuple(done),
        )  # fmt: skip


def found(network: Network, count: int = 80) -> list[tuple[int, Anomaly]]:
    judge, anomalies = Judge(DiagnosisLimits()), []
    for number, reports in enumerate(network.iterations(count)):
        judge.add(reports, number * 0.2)
        anomalies += [(number, one) for one in judge.look(number * 0.2)]
    return anomalies


def who(anomalies: list[tuple[int, Anomaly]]) -> list[tuple[str, int, int, str]]:
    return [(one.kind, one.rank, one.peer, one.port) for _, one in anomalies]


@pytest.mark.parametrize("sums", [True, False])
@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("jitter", [0.03, 0.1])
def test_the_slow_link_of_a_ring_is_named_and_nobody_else(
    sums: bool, buffered: bool, jitter: float
) -> None:
    right, latencies, seeds = 0, [], 16
    for seed in range(seeds):
        source, begins = seed % 4, 30 + seed % 7
        link = (source, (source + 1) % 4)
        network = Network(slower={link: 4.0}, begins=begins, buffered=buffered, sums=sums,
                          jitter=jitter, seed=seed)  # fmt: skip
        named = found(network, 60)
        right += who(named) == [("slow link", *link, "")]
        latencies += [number + 1 - begins for number, _ in named[:1]]
        for _, one in named[:1]:
            assert one.usual_rate == pytest.approx(SIZE / TRAVELS, rel=0.2)
            assert one.rate == pytest.approx(SIZE / TRAVELS / 4, rel=0.2)
            assert "which end of it is at fault is not known" in one.note
    assert right >= 0.95 * seeds
    assert sorted(latencies)[len(latencies) // 2] <= 10  # iterations


@pytest.mark.parametrize("percent", [10, 20, 30, 50, 100])
def test_a_slow_rank_of_a_ring_is_named_and_no_link(percent: int) -> None:
    right = 0
    for seed in range(12):
        named = found(Network(computes={seed % 4: percent / 100}, seed=seed, jitter=0.01))
        assert {one.kind for _, one in named} <= {"slow"}
        right += {one.rank for _, one in named} == {seed % 4}
    assert right == 12


@pytest.mark.parametrize("sums", [True, False])
@pytest.mark.parametrize("jitter", [0.03, 0.1, 0.3])
def test_nobody_is_named_where_all_is_as_before(sums: bool, jitter: float) -> None:
    for seed in range(5):
        assert found(Network(sums=sums, jitter=jitter, seed=seed), 200) == []


def test_a_slow_rank_where_nothing_but_messages_is_names_no_link() -> None:
    for seed in range(8):
        network = Network(computes={seed % 4: 1.0}, sums=False, buffered=bool(seed % 2), seed=seed)
        assert found(network) == []


def test_clocks_are_not_compared() -> None:
    plain = Network(slower={(1, 2): 4.0})
    off = Network(slower={(1, 2): 4.0}, offsets=(10.0, -10.0, 3.0, 0.0))
    (at, one), (again, other) = *found(plain), *found(off)
    assert (again, other.rank, other.peer) == (at, one.rank, one.peer) == (at, 1, 2)
    assert other.rate == pytest.approx(one.rate)
    assert other.usual_rate == pytest.approx(one.usual_rate)
    assert found(Network(drift=2e-4, sums=False), 300) == []


@pytest.mark.parametrize("port", ["out", "in"])
def test_where_all_links_of_a_port_are_slow_the_port_is_named(port: str) -> None:
    for rank in range(4):
        links = [(rank, peer) for peer in range(4) if peer != rank]
        slower = {link if port == "out" else link[::-1]: 4.0 for link in links}
        (named,) = found(Network(slower=slower, all_pairs=True, seed=rank))
        assert who([named]) == [("slow port", rank, -1, port)]
        words = f"the port of rank {rank} (host {'abcd'[rank]}), {port}, is slow since send "
        assert named[1].sentence.startswith(words)


def test_where_both_ends_have_other_links_it_is_the_link() -> None:
    (named,) = found(Network(slower={(2, 0): 4.0}, all_pairs=True))
    assert who([named]) == [("slow link", 2, 0, "")]
    assert named[1].note == "on their other links both are as fast as before"


@pytest.mark.parametrize("link", [(0, 1), (1, 0)])
def test_of_two_ranks_the_direction_is_named_and_that_the_end_is_not_known(link: Link) -> None:
    (named,) = found(Network(ranks=2, slower={link: 4.0}), 120)
    assert who([named]) == [("slow link", *link, "")]
    one, hosts = named[1], ["ab"[end] for end in link]
    assert one.sentence.startswith(
        f"the link rank {link[0]} (host {hosts[0]}) -> rank {link[1]} (host {hosts[1]}) is slow "
        "since send "
    )
    assert one.sentence.endswith(
        "before (which end of it is at fault is not known, as neither has another in that "
        "direction)"
    )


def test_all_links_that_become_slow_at_once_name_none() -> None:
    links = {(rank, (rank + 1) % 4): 4.0 for rank in range(4)}
    assert found(Network(slower=links)) == []


def test_what_hides_behind_compute_is_not_named() -> None:
    alone = Network(ranks=2, slower={(0, 1): 3.0}, overlapped=True)
    assert found(alone, 120) == []
    compute = Network(ranks=2, computes={1: 1.0}, overlapped=True, sums=False)
    assert found(compute, 120) == []


def test_a_link_that_is_fast_again_may_be_named_again() -> None:
    network = Network(slower={(3, 0): 4.0}, again=100)
    named = found(network, 130)
    assert who(named) == [("slow link", 3, 0, "")] * 2
    assert [40 <= named[0][0] < 50, 100 <= named[1][0] < 110] == [True, True]


def test_one_end_of_a_message_that_was_written_over_is_left_out() -> None:
    stream = [*Network(slower={(1, 2): 4.0}).iterations(80)]
    judge, named = Judge(DiagnosisLimits()), []
    draws = random.Random(0)
    for number, reports in enumerate(stream):
        fewer = [
            replace(one, done=tuple(c for c in one.done if draws.random() > 0.1)) for one in reports
        ]
        judge.add(fewer, number * 0.2)
        named += judge.look(number * 0.2)
    assert [(one.rank, one.peer) for one in named] == [(1, 2)]


def test_reports_of_messages_travel_as_they_are() -> None:
    (reports, *_) = Network().iterations(1)
    assert parse_reports(report_line(reports), 4) == reports


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
