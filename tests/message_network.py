"""Messages between ranks, made up by the equations of who waits for whom."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from modicum.core.ranks.observed_calls import RECEIVE, SEND, link_name
from modicum.core.ranks.rank_reports import DoneCall, RankReport

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
    only: frozenset[Link] | None = None  # of all pairs, those that send to one another

    def links(self, step: int) -> list[Link]:
        if self.all_pairs or self.only is not None:
            pairs = [(r, (r + step + 1) % self.ranks) for r in range(self.ranks)]
            return [one for one in pairs if self.only is None or one in self.only]
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
            rank=rank, host="abcdefgh"[rank], process="running", process_seconds=0.0,
            beat_seconds=0.1, starved=0.0, left=0, words="", marked=False, place="",
            entered={"0": number + 1},
            members={**members, "0": tuple(range(self.ranks))}, open=(), done=tuple(done),
        )  # fmt: skip
