"""What is slow together: in matrices, and in messages that were made up, over drawn networks."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from message_network import Link, Network

from modicum.comm.anomalies import Anomaly, DiagnosisLimits, between_groups
from modicum.comm.judging import Judge
from modicum.comm.link_patterns import BOTH, IN, OUT, LinkMatrix
from modicum.core.ranks.rank_reports import parse_event

BEGINS, ENOUGH = 40, 75  # iterations


def every(ranks: int) -> frozenset[Link]:
    return frozenset(itertools.permutations(range(ranks), 2))


@dataclass(frozen=True)
class Fault:
    """Links that a fault makes slow, and what must be said of them."""

    ranks: int
    links: frozenset[Link]
    port: str = ""
    rank: int = -1
    groups: tuple[tuple[int, ...], ...] = ()
    one_way: bool = False


def of_port(ranks: int, rank: int, port: str) -> Fault:
    ends = {OUT: (0,), IN: (1,), BOTH: (0, 1)}[port]
    links = frozenset(each for each in every(ranks) if any(each[end] == rank for end in ends))
    return Fault(ranks, links, port, rank)


def of_groups(ranks: int, *groups: Iterable[int], one_way: bool = False) -> Fault:
    made = tuple(tuple(sorted(group)) for group in groups)
    pairs = [(made[0], made[1])] if one_way else itertools.permutations(made, 2)
    links = frozenset((a, b) for one, other in pairs for a in one for b in other)
    return Fault(ranks, links, groups=made if one_way else tuple(sorted(made)), one_way=one_way)


@st.composite
def ports(draw: st.DrawFn, most: int = 8) -> Fault:
    ranks = draw(st.integers(3, most))
    port = draw(st.sampled_from([OUT, IN, BOTH]))
    return of_port(ranks, draw(st.integers(0, ranks - 1)), port)


@st.composite
def blocks(draw: st.DrawFn, most: int = 8) -> Fault:
    """Of two groups or three, of all ranks or some."""
    ranks = draw(st.integers(4, most))
    order = draw(st.permutations(range(ranks)))
    several = ranks > 5 and draw(st.booleans())
    bounds = [0, 2, 4, ranks] if several else [0, draw(st.integers(2, ranks - 2))]
    groups = [order[a:b] for a, b in itertools.pairwise(bounds)]
    if not several:
        groups.append(order[bounds[1] : draw(st.integers(bounds[1] + 2, ranks))])
    return of_groups(ranks, *groups, one_way=not several and draw(st.booleans()))


@st.composite
def cells(draw: st.DrawFn, most: int = 8) -> Fault:
    ranks = draw(st.integers(2, most))
    return Fault(ranks, frozenset({draw(st.sampled_from(sorted(every(ranks))))}))


def said_in(matrix: LinkMatrix, ends: Link) -> tuple[object, ...]:
    """What explains most of the links that are slow like one."""
    found = matrix.of(ends)[0]
    return found.links, found.port, found.rank, found.groups, found.one_way


@given(fault=st.one_of(ports(), blocks(), cells()), data=st.data())
def test_a_row_a_column_a_block_and_a_cell_are_told_apart(
    fault: Fault, data: st.DataObject
) -> None:
    """Of a matrix of which at most one entry is missing."""
    gone = data.draw(st.sampled_from([None, *sorted(every(fault.ranks))]))
    known, slow = every(fault.ranks) - {gone}, fault.links - {gone}
    if not slow or (fault.port and fault.ranks == 3 and gone in fault.links):
        return  # two links of a port are needed
    matrix = LinkMatrix(known, slow)
    for ends in slow:
        assert said_in(matrix, ends) == (
            slow, fault.port, fault.rank, fault.groups, fault.one_way,
        )  # fmt: skip
    assert matrix.loose == (slow if len(fault.links) == 1 else set())


@given(
    ranks=st.integers(2, 8),
    data=st.data(),
)
def test_a_pattern_has_slow_links_alone_and_all_that_it_says(
    ranks: int, data: st.DataObject
) -> None:
    """Whatever sends to what, and whatever is slow."""
    links = st.sets(st.sampled_from(sorted(every(ranks))), min_size=1)
    known = data.draw(links)
    slow = data.draw(st.sets(st.sampled_from(sorted(known))))
    matrix = LinkMatrix(known, slow)
    for one in matrix.patterns:
        assert one.links <= slow
        assert len(one.links) > 1
        if one.port:
            said = of_port(ranks, one.rank, one.port).links & known
        else:
            assert len(one.groups) > 1
            assert min(map(len, one.groups)) > 1
            assert len({rank for group in one.groups for rank in group}) == sum(
                map(len, one.groups)
            )
            full = of_groups(ranks, *one.groups, one_way=one.one_way).links
            said = full & known
            assert len(said) >= 0.75 * len(full)
        assert one.links == said
    for ends in slow:
        assert matrix.of(ends)[-1].links == {ends}


def test_links_of_a_ring_are_no_block() -> None:
    ring = {(rank, (rank + 1) % 4) for rank in range(4)}
    matrix = LinkMatrix(ring, {(1, 2), (3, 0)})
    assert matrix.patterns == []
    assert matrix.groups == ((0, 1), (2, 3))
    assert matrix.within == {(0, 1), (2, 3)}
    both = ring | {(b, a) for a, b in ring}
    assert LinkMatrix(both, {(1, 2), (2, 1), (3, 0), (0, 3)}).patterns == []


# On messages


def found(network: Network) -> list[Anomaly]:
    judge, anomalies = Judge(DiagnosisLimits()), list[Anomaly]()
    for number, reports in enumerate(network.iterations(ENOUGH)):
        judge.add(reports, number * 0.2)
        anomalies += judge.look(number * 0.2)
    return anomalies


def ranks_in(words: str) -> tuple[int, ...]:
    """Of `ranks 0, 2-4 (hosts a, b)`."""
    runs = [part.split("-") for part in words.removeprefix("ranks ").split(" (")[0].split(", ")]
    return tuple(rank for run in runs for rank in range(int(run[0]), int(run[-1]) + 1))


def groups_of(one: Anomaly) -> tuple[tuple[tuple[int, ...], ...], bool]:
    """Between which groups a block is, and whether one way."""
    how, ranks = one.between.split(" ", 1) if one.between else ("", "")
    words = re.findall(r"ranks [^)]*\)", ranks)
    assert how in ("", "from" if " to " in ranks else "between")
    return tuple(map(ranks_in, words)), how == "from"


def named(one: Anomaly, known: frozenset[Link]) -> frozenset[Link]:
    """The links that an alarm means."""
    size = max(map(max, known)) + 1
    if one.kind == "slow block":
        groups, one_way = groups_of(one)
        return of_groups(size, *groups, one_way=one_way).links & known
    if one.kind == "slow port":
        return of_port(size, one.rank, one.port).links & known
    assert one.kind == "slow link"
    return frozenset({(one.rank, one.peer)})


FACTORS, JITTERS = st.floats(2.6, 8.0), st.sampled_from([0.03, 0.1])
SEEDS = st.integers(0, 10**6)


def faults(ranks: int) -> st.SearchStrategy[Fault]:
    """Of so many ranks at most."""
    kinds = [cells(ranks)] + [ports(ranks)] * (ranks > 2) + [blocks(ranks)] * (ranks > 3)
    return st.one_of(kinds)


@settings(max_examples=60)
@given(fault=faults(6), factor=FACTORS, jitter=JITTERS, seed=SEEDS)
def test_where_all_send_to_all_one_alarm_says_what_is_slow(
    fault: Fault, factor: float, jitter: float, seed: int
) -> None:
    network = Network(
        ranks=fault.ranks, slower=dict.fromkeys(fault.links, factor), begins=BEGINS, seed=seed,
        jitter=jitter, all_pairs=True,
    )  # fmt: skip
    (one,) = found(network)
    assert named(one, every(fault.ranks)) == fault.links
    assert (one.port, *groups_of(one)) == (fault.port, fault.groups, fault.one_way)
    if fault.port:
        assert one.rank == fault.rank
    assert one.rate == pytest.approx(one.usual_rate / factor, rel=0.25)


@settings(max_examples=60)
@given(fault=faults(6), factor=FACTORS, jitter=JITTERS, seed=SEEDS, buffered=st.booleans())
def test_where_ranks_do_not_wait_for_all_that_comes_no_fast_link_is_named(
    fault: Fault, factor: float, jitter: float, seed: int, buffered: bool
) -> None:
    """What comes while a rank waits for something else took nobody knows how long.

    So may all that is slow, where a send ends when it has come: each rank receives meanwhile.
    """
    network = Network(
        ranks=fault.ranks, slower=dict.fromkeys(fault.links, factor), begins=BEGINS, seed=seed,
        buffered=buffered, sums=False, jitter=jitter, all_pairs=True,
    )  # fmt: skip
    links = [link for one in found(network) for link in named(one, every(fault.ranks))]
    assert set(links) <= fault.links
    assert links or not buffered


@st.composite
def networks(draw: st.DrawFn, *, drawn: bool = True) -> tuple[int, frozenset[Link]]:
    """Who sends to whom: all, round a ring, there and back, along a line, or whatever is drawn."""
    ranks = draw(st.integers(2, 6))
    ring = {(rank, (rank + 1) % ranks) for rank in range(ranks)}
    line = {(rank, rank + 1) for rank in range(ranks - 1)}
    kinds = [every(ranks), ring, ring | {(b, a) for a, b in ring}, line,
             line | {(b, a) for a, b in line}]  # fmt: skip
    if drawn:
        kinds.append(draw(st.sets(st.sampled_from(sorted(every(ranks))), min_size=2)))
    return ranks, frozenset(draw(st.sampled_from(kinds)))


@settings(max_examples=60)
@given(network=networks(), data=st.data(), factor=FACTORS, seed=SEEDS, sums=st.booleans())
def test_whoever_sends_to_whom_no_fast_link_is_named_and_none_twice(
    network: tuple[int, frozenset[Link]], data: st.DataObject, factor: float, seed: int, sums: bool
) -> None:
    ranks, known = network
    slow = data.draw(faults(ranks)).links & known
    made = Network(ranks=ranks, slower=dict.fromkeys(slow, factor), begins=BEGINS, seed=seed,
                   sums=sums, only=known)  # fmt: skip
    links = [link for one in found(made) for link in named(one, known)]
    assert set(links) <= slow
    assert len(links) == len(set(links))


@settings(max_examples=60)
@given(network=networks(drawn=False), data=st.data(), factor=st.floats(4.0, 8.0), seed=SEEDS)
def test_slow_links_are_named_where_others_are_as_fast_as_before(
    network: tuple[int, frozenset[Link]], data: st.DataObject, factor: float, seed: int
) -> None:
    """As they are where more links are not slow, or slow ones join groups that fast ones make.

    Where they are no pattern, each is for itself, and says how many they are. What a rank waits for
    in turn may seem to take longer before, and so half as many times as long.
    """
    ranks, known = network
    slow = data.draw(faults(ranks)).links & known
    made = Network(ranks=ranks, slower=dict.fromkeys(slow, factor), begins=BEGINS, seed=seed,
                   only=known)  # fmt: skip
    alarms, matrix = found(made), LinkMatrix(known, slow)
    if 2 * len(slow) < len(known) or (matrix.within and matrix.within == known - slow):
        assert {link for one in alarms for link in named(one, known)} == slow
    for one in alarms:
        assert ("links are slow at once" in one.note) == (
            one.kind == "slow link" and len(matrix.loose) > 1
        )


@settings(max_examples=40)
@given(
    network=networks(), factor=st.floats(1.0, 6.0), jitter=JITTERS, seed=SEEDS,
    late=st.sampled_from([0.0, 0.5]), sums=st.booleans(),
)  # fmt: skip
def test_nothing_is_said_of_links_that_are_alike(
    network: tuple[int, frozenset[Link]], factor: float, jitter: float, seed: int, late: float,
    sums: bool,
) -> None:  # fmt: skip
    """Though all become as slow at once, and one rank may compute longer."""
    ranks, known = network
    compared = [any(a not in one and b not in one for a, b in known) for one in known]
    made = Network(
        ranks=ranks, slower=dict.fromkeys(known, factor if all(compared) else 1.0), seed=seed,
        begins=BEGINS, jitter=jitter, only=known, computes={0: late}, sums=sums,
    )  # fmt: skip
    assert {one.kind for one in found(made)} <= {"slow"}


def test_the_sentence_names_groups_their_hosts_and_the_direction() -> None:
    links = of_groups(4, (0, 1), (2, 3)).links
    (both,) = found(Network(slower=dict.fromkeys(links, 4.0), all_pairs=True))
    assert both.sentence.startswith(
        "the links between ranks 0, 1 (hosts a, b) and ranks 2, 3 (hosts c, d) are slow since send "
    )
    links = of_groups(4, (2, 3), (0, 1), one_way=True).links
    (one,) = found(Network(slower=dict.fromkeys(links, 4.0), all_pairs=True))
    assert one.sentence.startswith(
        "the links from ranks 2, 3 (hosts c, d) to ranks 0, 1 (hosts a, b) are slow since send "
    )
    (rank,) = found(Network(slower=dict.fromkeys(of_port(4, 1, BOTH).links, 4.0), all_pairs=True))
    assert rank.sentence.startswith("the port of rank 1 (host b), out and in, is slow since send ")
    for alarm in (both, one, rank):
        assert parse_event(json.dumps(alarm.as_json()).encode()) == alarm.as_json()


def test_a_link_within_a_group_is_named_after_the_block() -> None:
    """Though most links are slow already."""
    block = dict.fromkeys(of_groups(4, (0, 1), (2, 3)).links, 4.0)
    judge, alarms = Judge(DiagnosisLimits()), list[Anomaly]()
    network = Network(slower=block, all_pairs=True)
    for number, reports in enumerate(network.iterations(140)):
        if number == 90:
            network.slower = {**block, (2, 3): 4.0}
        judge.add(reports, number * 0.2)
        alarms += judge.look(number * 0.2)
    assert [one.kind for one in alarms] == ["slow block", "slow link"]
    assert (alarms[1].rank, alarms[1].peer) == (2, 3)


def test_a_block_may_be_named_again_when_it_was_fast() -> None:
    links = of_groups(4, (0, 1), (2, 3)).links
    network = Network(slower=dict.fromkeys(links, 4.0), all_pairs=True, again=130)
    judge, alarms = Judge(DiagnosisLimits()), list[Anomaly]()
    for number, reports in enumerate(network.iterations(170)):
        judge.add(reports, number * 0.2)
        alarms += judge.look(number * 0.2)
    assert [groups_of(one) for one in alarms] == [(((0, 1), (2, 3)), False)] * 2


def test_agents_take_the_longest_sentence_of_a_block() -> None:
    """Of ranks that do not follow one another, on hosts with the longest names."""
    ranks = [range(first, 1000, 2) for first in (0, 1)]
    hosts = [[f"{rank:0>255}" for rank in group] for group in ranks]
    said = between_groups(ranks, hosts, one_way=False)
    assert said.startswith("between ranks 0, 2, 4, ")
    one = Anomaly("slow block", 0, "a" * 255, "send 1", False, "", 1.0, ends=False,
                  note="n" * 1000, peer=1, peer_host="b" * 255, between=said)  # fmt: skip
    assert parse_event(json.dumps(one.as_json()).encode())["between"] == said
