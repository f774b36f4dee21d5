"""Which link between two ranks stands still: a message does not come, and both its ends are there.

Which one is slow, `slow_links` says of messages that have come. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from modicum.comm.anomalies import TOGETHER_SECONDS, Anomaly
from modicum.comm.seen_ranks import SeenRanks
from modicum.core.ranks.rank_reports import OpenCall


@dataclass(frozen=True)
class _Standing:
    """A message that travels: seconds `over` what it may, since when, if its bytes are known."""

    over: float
    stood: float
    known: bool
    call: OpenCall


class StuckLinks:
    """Follows the messages that travel, and says which one will not come any more.

    Args:
        seen: what is known of the ranks, which somebody else adds to.
        silent_seconds: for which a message may travel, however short those before did.
    """

    def __init__(self, seen: SeenRanks, silent_seconds: float) -> None:
        self._seen, self._silent_seconds = seen, silent_seconds
        self._travel: dict[tuple[str, int], float] = {}  # messages, and since when they do

    def resumed(self, now: float) -> None:
        """Nobody looked until `now`: from here on times count."""
        self._travel = dict.fromkeys(self._travel, now)

    def look(self, now: float) -> list[Anomaly]:
        """Messages that do not come, though both ends stand there, and neither is stopped.

        After so long a run ends as for a silent host, where no message of the link took nearly as
        long before, by its bytes. Of one of which these are not known that is said alone.
        """
        calls = {(call.group, call.sequence): call for call in self._seen.travelling()}
        self._travel = {key: self._travel.get(key, now) for key in calls}
        found = []
        for key, call in calls.items():
            stood, size = now - self._travel[key], self._seen.size_of(call)
            if patience := self._seen.messages.patience(call.group, size):
                over = stood - max(patience, self._silent_seconds)
                found.append(_Standing(over, stood, bool(size), call))
        longest = max(found, key=lambda one: (one.over >= 0 and one.known, one.over), default=None)
        if longest is None or longest.over < 0:
            return []
        call, members = longest.call, self._seen.groups
        source, target = members[call.group].members
        near = [one.call.group for one in found if one.over >= -TOGETHER_SECONDS]
        ends = [set(members[group].members) for group in near]
        common = sorted(set.intersection(*ends)) if len(ends) > 1 else []
        kind, rank, peer = "stuck link", source, target
        if len(common) == 1:
            kind, rank, peer = "stuck port", common[0], -1
        hosts = [self._seen.host(one) for one in (rank, peer)]
        note = "" if longest.known else "its bytes are not known, so the run is not ended"
        return [
            Anomaly(
                kind, rank, hosts[0], self._seen.said_of(call, source), True, "", longest.stood,
                ends=longest.known, note=note, peer=peer, peer_host=hosts[1],
            )
        ]  # fmt: skip
