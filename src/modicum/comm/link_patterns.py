"""Which links are slow together: those of a port, or all between groups of ranks, as of a switch.

In a matrix of links, sources by rows and targets by columns, a slow row is the port out of a rank,
a slow column the one into it, and a slow block what joins those sources with those targets (C4,
arXiv 2406.04594). Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from functools import cached_property

Ends = tuple[int, int]  # who sends over a link, and who receives
RankGroup = tuple[int, ...]
OUT, IN, BOTH = "out", "in", "out and in"
SEEN = 3 / 4  # of the links of a block, which must be used


@dataclass(frozen=True)
class LinkPattern:
    """Links that one fault explains.

    Args:
        port, rank: `OUT`, `IN` or `BOTH` where they are all of that rank's in that direction.
        groups: ranks between which they are; where they are `one_way`, from the first to the
            second.
    """

    links: frozenset[Ends]
    port: str = ""
    rank: int = -1
    groups: tuple[RankGroup, ...] = ()
    one_way: bool = False


class LinkMatrix:
    """Links of which the times are known, those of them that are slow, and every one that is used.

    >>> every = {(a, b) for a in range(4) for b in range(4) if a != b}
    >>> [one] = LinkMatrix(every, {(a, b) for a, b in every if (a < 2) != (b < 2)}).patterns
    >>> one.groups, one.one_way, len(one.links)
    (((0, 1), (2, 3)), False, 8)
    """

    def __init__(
        self, known: Iterable[Ends], slow: Iterable[Ends], used: Iterable[Ends] = ()
    ) -> None:
        self.known, self.slow = frozenset(known), frozenset(slow)
        self.used = self.known.union(used)
        self._targets: dict[int, set[int]] = {}
        self._sources: dict[int, set[int]] = {}
        for source, target in self.slow:
            self._targets.setdefault(source, set()).add(target)
            self._sources.setdefault(target, set()).add(source)

    def of(self, ends: Ends) -> list[LinkPattern]:
        """What may explain that a link is slow, by the most links first; at last itself alone.

        Nothing does that explains no other one which a larger fault does not explain without it.
        """
        found, explained = [], set[Ends]()
        for one in self.patterns:
            if ends not in one.links:
                explained |= one.links
            elif one.links - explained != {ends}:
                found.append(one)
        return [*found, self.alone(ends)]

    @staticmethod
    def alone(ends: Ends) -> LinkPattern:
        """That a link alone is slow."""
        return LinkPattern(frozenset({ends}))

    @cached_property
    def patterns(self) -> list[LinkPattern]:
        """Ports and blocks all of whose links are slow, as far as used; by the most links first."""
        found = {*self._ports(), *self._blocks()}
        return sorted(found, key=lambda one: (-len(one.links), one.rank, one.groups, one.port))

    @cached_property
    def loose(self) -> frozenset[Ends]:
        """Slow links that nothing explains but themselves."""
        return frozenset(ends for ends in self.slow if len(self.of(ends)) == 1)

    @cached_property
    def groups(self) -> tuple[RankGroup, ...]:
        """Groups of ranks that links which are not slow join, where all between them are slow.

        None where all ranks are in one; or where there are more than two, and a rank is alone: then
        several are at fault.
        """
        joined = {rank: {rank} for ends in self.used for rank in ends}
        for source, target in self.used - self.slow:
            if joined[source] is not joined[target]:
                joined[source] |= joined[target]
                for rank in joined[target]:
                    joined[rank] = joined[source]
        groups = sorted({tuple(sorted(each)) for each in joined.values()})
        sizes = sorted(map(len, groups))
        two, more = len(groups) == 2 and sizes[1] > 1, len(groups) > 2 and sizes[0] > 1
        return tuple(groups) if two or more else ()

    @cached_property
    def within(self) -> frozenset[Ends]:
        """Links that are used within `groups`."""
        ours = {rank: group for group in self.groups for rank in group}
        return frozenset(each for each in self.used if ours and ours[each[0]] == ours[each[1]])

    def are_fast(self, links: Set[Ends]) -> bool:
        """Whether any of these links is known and none is slow."""
        return bool(links & self.known) and not links & self.slow

    def of_end(self, rank: int, end: int) -> frozenset[Ends]:
        """The links that are used and of which a rank is that end: 0 the source, 1 the target."""
        return frozenset(each for each in self.used if each[end] == rank)

    def _ports(self) -> Iterator[LinkPattern]:
        for rank in {rank for ends in self.slow for rank in ends}:
            both = {OUT: self.of_end(rank, 0), IN: self.of_end(rank, 1)}
            slow = {
                port: links for port, links in both.items() if len(links) > 1 and links <= self.slow
            }
            for port, links in slow.items():
                yield LinkPattern(links, port, rank)
            if len(slow) == 2:
                yield LinkPattern(slow[OUT] | slow[IN], BOTH, rank)

    def _blocks(self) -> Iterator[LinkPattern]:
        if self.groups and min(map(len, self.groups)) > 1:
            crossing = self.used - self.within
            ranks = sum(map(len, self.groups))
            cells = ranks**2 - sum(len(group) ** 2 for group in self.groups)
            if len(crossing) >= SEEN * cells:
                yield LinkPattern(crossing, groups=self.groups)
        blocks = {pair: links for pair in self._pairs() if (links := self._block(*pair))}
        for (sources, targets), links in blocks.items():
            if back := blocks.get((targets, sources)):
                groups = (min(sources, targets), max(sources, targets))
                yield LinkPattern(links | back, groups=groups)
            else:
                yield LinkPattern(links, groups=(sources, targets), one_way=True)

    def _pairs(self) -> set[tuple[RankGroup, RankGroup]]:
        """Sources and targets that may make a block: by each slow link, and by what it joins."""
        found = set()
        for source, target in self.slow:
            sources, targets = self._sources[target], self._targets[source]
            found.add((tuple(sorted(sources)), tuple(sorted(targets))))
        left = set(self.slow)
        while left:
            first = left.pop()
            sources, targets = {first[0]}, {first[1]}
            while near := {each for each in left if each[0] in sources or each[1] in targets}:
                left -= near
                sources |= {source for source, _ in near}
                targets |= {target for _, target in near}
            found.add((tuple(sorted(sources)), tuple(sorted(targets))))
        return found

    def _block(self, sources: RankGroup, targets: RankGroup) -> frozenset[Ends] | None:
        """The slow links from some ranks to others, where that is a block; None: it is not."""
        if min(len(sources), len(targets)) < 2 or set(sources) & set(targets):
            return None
        used = self.used & {(source, target) for source in sources for target in targets}
        seen = len(used) >= SEEN * len(sources) * len(targets)
        return used if seen and used <= self.slow else None
