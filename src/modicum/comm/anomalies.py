"""What is found of ranks that train together, and by which limits. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from modicum.core.units import format_bytes

# Who hears nothing of one other host alone cannot tell which of the two it is.
EITHER_END = "it may be this host's own link that is down"
TOGETHER_SECONDS = 1.0  # within which all hosts fall silent when one cable is pulled
STUCK = ("stuck link", "stuck port")
LINKS = ("slow link", "slow port", "slow block", *STUCK)


@dataclass(frozen=True)
class DiagnosisLimits:
    """When something is said, and when the run is ended.

    Args:
        silent_seconds: a rank whose process is stopped, or whose host says nothing, for so long
            is ended, and the run with it.
        late_seconds: a rank that lives, and for which others wait so long, is named.
        slow_share: of the time of an iteration; a rank for which the others wait as much in each
            is named.
        stopped_seconds: a stopped process is named after so long.
    """

    silent_seconds: float = 8.0
    late_seconds: float = 30.0
    slow_share: float = 0.05
    stopped_seconds: float = 1.5


@dataclass(frozen=True)
class Anomaly:
    """What was found.

    Args:
        kind: `dead`, `stopped`, `silent`, `isolated`, `failed`, `left`, `late`, `slow`,
            `apart`, `slow link`, `slow port`, `slow block`, `stuck link` or `stuck port`.
        rank, host: who holds up the others; of a link, who sends over it; of ranks that are in
            different calls where they should be in one, the first of the fewest.
        collective: the call that it has not entered, or is in; empty where none is known.
        inside: whether it is in the call.
        place: where its main thread was last seen.
        seconds: since when.
        ends: whether the run is ended for it.
        share: of a slow rank, what the others wait of an iteration; else 0.
        note: what else is to be known.
        peer, peer_host: of a link, who receives; of ranks that are apart, one of the others, which
            is in `peer_collective`; else -1.
        port: of a slow port whether it is that `out` of the rank, `in`, or `out and in`.
        rate, usual_rate: bytes a second of a link, now and before; of several links, of one.
        between: of a slow block the groups of ranks between which, or from which to which, all
            links are slow, and their hosts, for people.
    """

    kind: str
    rank: int
    host: str
    collective: str
    inside: bool
    place: str
    seconds: float
    ends: bool
    share: float = 0.0
    note: str = ""
    peer: int = -1
    peer_host: str = ""
    port: str = ""
    rate: float = 0.0
    usual_rate: float = 0.0
    peer_collective: str = ""
    between: str = ""

    @property
    def sentence(self) -> str:
        """The anomaly in one sentence."""
        who = f"rank {self.rank} (host {self.host})"
        since = f"since {self.seconds:.0f} s"
        what = {
            "dead": "is dead",
            "stopped": "is stopped",
            "silent": "gives no sign of life",
            "isolated": "hears nothing of any other host",
            "failed": "has failed",
            "left": "has ended, and others wait for it",
        }.get(self.kind, "")
        if self.kind in LINKS:
            return self._of_link(who) + self._noted()
        if self.kind == "slow":
            said = f"{who} is slow: the others wait for it {self.share:.0%} of the time"
        elif self.kind == "late":
            said = f"{who} has not entered {self.collective}"
            return f"{said}; it is in {self.place or 'an unknown place'}, {since}{self._noted()}"
        elif self.kind == "apart":
            other = f"rank {self.peer} (host {self.peer_host}) in {self.peer_collective}"
            said = f"{who} is in {self.collective} and {other}, {since}: these never end"
        else:
            said = f"{who} {what} {since}"
            if self.collective:
                where = "in" if self.inside else "and has not entered"
                said += f", {where} {self.collective}"
        if self.place:
            said += f"; it was last seen in {self.place}"
        return said + self._noted()

    def _of_link(self, who: str) -> str:
        what = f"the link {who} -> rank {self.peer} (host {self.peer_host})"
        if self.peer < 0:
            what = f"the port of {who}" + (f", {self.port}," if self.port else "")
        if self.kind in STUCK:
            return f"{what} stands still since {self.seconds:.0f} s, in {self.collective}"
        said = f"the links {self.between} are slow" if self.between else f"{what} is slow"
        rates = [f"{format_bytes(round(rate))} a second" for rate in (self.rate, self.usual_rate)]
        since = f"since {self.collective}, {self.seconds:.1f} s ago"
        return f"{said} {since}: {rates[0]}, and {rates[1]} before"

    def _noted(self) -> str:
        return f" ({self.note})" if self.note else ""

    def as_json(self) -> dict[str, Any]:
        """The anomaly as plain values, its sentence among them."""
        return asdict(self) | {"sentence": self.sentence}


def between_groups(
    groups: Sequence[Sequence[int]], hosts: Sequence[Sequence[str]], *, one_way: bool
) -> str:
    """Groups of ranks and the hosts of these that are known, for people.

    >>> between_groups([[0, 1], [2, 4, 5, 6]], [["a", "b"], ["c", "c", "", ""]], one_way=False)
    'between ranks 0, 1 (hosts a, b) and ranks 2, 4-6 (host c)'
    >>> between_groups([[2, 3], [0, 1]], [["", ""], ["", ""]], one_way=True)
    'from ranks 2, 3 to ranks 0, 1'
    """
    said = [*map(_group, groups, hosts)]
    if one_way:
        return f"from {said[0]} to {said[1]}"
    return f"between {', '.join(said[:-1])} and {said[-1]}"


def _group(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    known = list(dict.fromkeys(filter(None, hosts)))
    where = f" (host{'s' * (len(known) > 1)} {_first(known, 4)})" if known else ""
    return f"ranks {_first(parts, 16)}{where}"


def _first(words: Sequence[str], most: int) -> str:
    """Some words, and how many there are more: a line is as long as an agent takes.

    >>> _first(["a", "b", "c"], 3), _first(["a", "b", "c"], 1)
    ('a, b, c', 'a and 2 more')
    """
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more
