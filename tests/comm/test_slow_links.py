"""Which link is slow, on messages that were made up by the equations of who waits for whom."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from message_network import SIZE, TRAVELS, Link, Network

from modicum.comm.anomalies import Anomaly, DiagnosisLimits
from modicum.comm.judging import Judge
from modicum.comm.slow_links import LinkMessages
from modicum.core.ranks.observed_calls import RECEIVE, SEND
from modicum.core.ranks.rank_reports import DoneCall, parse_reports, report_line


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


def test_a_large_message_in_between_changes_no_sizes() -> None:
    """It is the heaviest from then on, and a link is named by what its pace was taken of."""
    links = LinkMessages()

    def send(to: int, number: int, size: int, took: float) -> None:
        for kind, sent in ((SEND, size), (RECEIVE, 0)):
            times = (took, number / 2 + took, False, took)
            links.done((0, to), DoneCall(f"0 0>{to}", number, kind, "", sent, *times))

    for number in range(69):
        for to in (1, 2):
            send(to, number, 1000, 0.05 if number < 60 else 0.4)
    assert links.slow() == []
    for number in range(69, 72):
        send(2, number, 1000, 0.4)
    send(1, 69, 10**7, 0.4)
    assert [link.rate for link in links.slow()] == [pytest.approx(2500)]


def test_reports_of_messages_travel_as_they_are() -> None:
    (reports, *_) = Network().iterations(1)
    assert parse_reports(report_line(reports), 4) == reports
