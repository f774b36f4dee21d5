"""A process next to a rank that ends it if it is stopped, until the ranks watch each other.

The others name such a rank and end, and nobody else on its host would end it. Nothing here imports
torch.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from modicum.core.module_process import module_command
from modicum.core.ranks.rank_probe import process_state

_LOOK_SECONDS = 0.25


@contextmanager
def guarded(name: str, seconds: float) -> Iterator[None]:
    """Have this process ended if it is stopped for so many seconds in the block.

    Args:
        name: of the rank, for people.
    """
    command = module_command("modicum.core.ranks.rank_guard", str(os.getpid()), str(seconds), name)
    # In this process's group: who stops all of them by Ctrl-Z stops this one as well.
    with subprocess.Popen(command, stdin=subprocess.PIPE) as guard:
        try:
            yield
        finally:
            guard.kill()


def main(pid: int, seconds: float, name: str) -> None:
    """Look at the process until it is stopped for too long, or standard input ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    since: float | None = None
    while not select.select([sys.stdin], [], [], _LOOK_SECONDS)[0]:
        now = time.monotonic()
        since = (since or now) if process_state(pid) == "stopped" else None
        if since is not None and now - since >= seconds:
            said = f"is stopped since {seconds:g} s, before ranks watched each other, and is ended"
            print(f"modicum: {name} {said}", file=sys.stderr, flush=True)
            os.kill(pid, signal.SIGKILL)
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
