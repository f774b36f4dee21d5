"""Which rank this process is, as its environment tells; read without torch.

torchrun and `modicum train --ranks N` set the same variables. The second also names its own
process, the supervisor, with whom its ranks end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from modicum.core.ranks.environment import rank_and_size

SUPERVISOR = "MODICUM_SUPERVISOR"
# What a supervised rank ends with when another one is gone: a consequence, never the reason.
LOST = 76
# How often ranks were started again, as torchrun sets it and our supervisor does.
STARTS = "TORCHELASTIC_RESTART_COUNT"
_TORCHRUN = "TORCHELASTIC_RUN_ID"  # torchrun sets it, and is its ranks' parent
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's <sys/prctl.h>


@dataclass(frozen=True)
class RankPlace:
    """A process among the ranks of a run.

    Args:
        rank, size: its number, and how many there are.
        supervised: whether a supervisor of ours has started it, who says what became of the run.

    >>> RankPlace(), RankPlace(1, 2).name
    (RankPlace(rank=0, size=1, supervised=False), 'rank 1')
    """

    rank: int = 0
    size: int = 1
    supervised: bool = False

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which alone shows progress."""
        return self.rank == 0

    @property
    def name(self) -> str:
        """The rank, for people; nothing for rank 0, which speaks for all."""
        return "" if self.first else f"rank {self.rank}"


def place(environment: Mapping[str, str] = os.environ) -> RankPlace:
    """The place that the environment tells of: alone, where it names no ranks or a single one.

    Raises:
        InputError: it names no possible rank.

    >>> place({"RANK": "1", "WORLD_SIZE": "2"})
    RankPlace(rank=1, size=2, supervised=False)
    """
    supervised = SUPERVISOR in environment
    return RankPlace(*rank_and_size(environment), supervised)


def started_elsewhere(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether somebody else, such as torchrun, has made this process a rank already."""
    return "RANK" in environment


def started_again(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process replaces a rank that ended: the run is under way."""
    return environment.get(STARTS, "0") != "0"


def end_with_supervisor() -> None:
    """Let the system end this process when whoever started it as a rank ends, however that happens.

    A supervisor that is killed can tell nobody (nor can torchrun), and ranks without one would hold
    the run folder and the machine's memory. A process that is no rank is left alone.
    """
    name = os.environ.get(SUPERVISOR, "")
    if not name.isdigit() and _TORCHRUN not in os.environ:
        return
    parent = int(name) if name.isdigit() else os.getppid()
    if sys.platform == "linux":
        # The kernel does it, also while the interpreter is busy in a call that does not return.
        ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it ended before it could be watched
        os._exit(LOST)


def _watch_parent(parent: int, seconds: float = 0.5) -> None:
    """End this process once its parent is another one than `parent`."""
    while os.getppid() == parent:
        time.sleep(seconds)
    os._exit(LOST)
