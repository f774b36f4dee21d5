"""Whether this machine does nothing else: looked at before each series that is timed.

One of those that time at once has the machine's lock. Its load is how many processors programs have
at a moment at which the series before has ended and the next one has not begun; the kernel's means
over a minute and more are of that series itself. Nothing here imports torch.
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from modicum.core.errors import InputError
from modicum.proofs.bench.busy_cores import BusyCores

BUSY = 0.5  # processors that others may have
LOOKS, PATIENCE = 2.0, 60.0  # seconds for which the load is counted, and until it must have fallen
_held: list[Path] = []  # locks of this process


class BusyMachine(InputError):
    """Other programs run on this machine: figures would be theirs, too."""


def say(text: str) -> None:
    """Tell who watches; standard output is for results."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def alone() -> Iterator[None]:
    """Wait until nobody else times anything on this machine, and keep others waiting.

    A block within a block of the same process waits for nobody.
    """
    path = Path(tempfile.gettempdir()) / f"modicum-benchmark-{os.getuid()}.lock"
    if path in _held:
        yield
        return
    with open(path, "a", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another benchmark to end")
            fcntl.flock(handle, fcntl.LOCK_EX)
        _held.append(path)
        try:
            yield
        finally:
            _held.remove(path)


def busy_processors(seconds: float = LOOKS) -> float:
    """How many processors programs have, this one among them, which sleeps meanwhile.

    >>> 0 <= busy_processors(0.01) <= psutil.cpu_count()
    True
    """
    cores = BusyCores()
    cores.begin()
    time.sleep(seconds)
    cores.end()
    return cores.share * (psutil.cpu_count() or 1)


def quiet(*, refuses: bool = True) -> float:
    """The load right before a series, once it has fallen to what others may have.

    Args:
        refuses: or the load is what it is, and nothing is waited for: of runs that give no figures.

    Raises:
        BusyMachine: it has not fallen in time.
        RuntimeError: this process has not got the machine's lock.
    """
    if not _held:
        raise RuntimeError("what is timed is timed within `alone`")
    load, begun = busy_processors(), time.monotonic()
    if refuses and load > BUSY:
        say(f"waiting for other programs, which have {load:.1f} processors")
    while refuses and load > BUSY:
        if time.monotonic() - begun > PATIENCE:
            problem = f"other programs run here: they have {load:.1f} processors, so no figures"
            raise BusyMachine(problem, allowed=f"{BUSY:g} at most")
        load = busy_processors()
    return load
