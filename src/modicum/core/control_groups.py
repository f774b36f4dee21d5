"""The control groups (version 2) that this process is in. Nothing here imports torch."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

# Where they are, and the file that says which one this process is in.
CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def groups_around() -> list[Path]:
    """The folder of every control group around this process, the outermost first.

    A container may see a group by another path, so that a folder need not be there.
    """
    own = b""
    with suppress(OSError):
        lines = OWN_CGROUP.read_bytes().split(b"\n")
        own = next((line[3:] for line in lines if line.startswith(b"0::")), b"")
    names = [name for name in os.fsdecode(own).split("/") if name]
    return [CGROUPS.joinpath(*names[:depth]) for depth in range(len(names) + 1)]
