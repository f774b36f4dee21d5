"""What methods of the section `watchdog` share: they look at the ranks, and change nothing.

Such a method neither sends nor changes a gradient, so it goes with every other method, also with
those of `comm` and of `diagnosis`: it has a section of its own. Nothing of it is in a checkpoint.
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path

from modicum.comm.watching import COMING_SECONDS, Watch
from modicum.core.contracts.method import Method


class RankWatchdog(Method):
    """The value of a method that names who holds up the others."""

    @abstractmethod
    def watch(
        self,
        *,
        record: str | Path | None = None,
        run: str | Path | None = None,
        coming_seconds: float = COMING_SECONDS,
    ) -> Watch:
        """Begin to look at the ranks of the default process group; all of them call this.

        Args:
            record: a file to which rank 0's host adds what was found, a line of JSON each.
            run: the `run.json` of a run, in which rank 0's host says why it was ended, where that
                is so.
            coming_seconds: how long a rank may take until it calls this as well; then it is named.

        Raises:
            PeerLost: a rank does not come.
        """
