"""One process measures the machine at a time, and the others wait for its figures."""

from __future__ import annotations

import fcntl
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from modicum.core.machine.identity import fallback_folder, record_file


def tell(text: str) -> None:
    """Say a sentence on standard error, before something takes seconds."""
    print(f"modicum: {text}", file=sys.stderr, flush=True)


@contextmanager
def turn(
    device: str = "cpu", what: str = "", say: Callable[[str], None] | None = None
) -> Iterator[Path]:
    """The record's file, while no other process measures or writes what this one does.

    That it waits for another one is said. Where the disk keeps no locks, nobody waits; where the
    cache cannot be written, it is the file of this user's temporary folder.
    """
    file = record_file(device)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = open(file.with_suffix(f"{what}.lock"), "a", encoding="utf-8")  # noqa: SIM115
    except OSError:
        file = fallback_folder(make=True) / file.name
        handle = open(file.with_suffix(f"{what}.lock"), "a", encoding="utf-8")  # noqa: SIM115
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if say is not None:
                say("Another process measures this machine; waiting for its figures.")
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            pass
        yield file
