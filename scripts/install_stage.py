"""Run a stage of `make install`, with its output in the log, and show that it is at work.

On a terminal a line is rewritten with the time and what pip is doing; elsewhere, as in the log of a
CI, the stage is one line when it is over. Only the standard library is there by then.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_PAUSE = 0.5  # seconds between two looks at the log
# What pip says of its work; of a wheel its name and its size.
_DOING = re.compile(r"^\s*(Collecting|Downloading|Using cached|Installing|Building|Preparing) .*")
_TAIL = 4096  # bytes of the log in which its last lines are


def doing(log: Path) -> str:
    """What pip says that it is doing, by the end of its log; nothing where it says nothing."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL))
        lines = file.read().decode("utf-8", "replace").splitlines()
    found = next((line for line in reversed(lines) if _DOING.match(line)), "").strip()
    word, _, what = found.partition(" ")
    if word == "Installing" and "packages:" in what:  # the names of all of them follow
        return f"installing {what.count(',') + 1} packages"
    return f"{word.lower()} {what.rpartition('/')[2]}" if found else ""


def duration(seconds: float) -> str:
    """Seconds for people."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02d} s"


def run(label: str, log: Path, command: Sequence[str]) -> int:
    """Run a command and show it; its exit status."""
    begun, shows = time.monotonic(), sys.stdout.isatty() and not os.environ.get("CI")
    with log.open("ab") as output, subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT
    ) as process:  # fmt: skip
        while (status := process.poll()) is None:
            if shows:
                line = f"{label}: {duration(time.monotonic() - begun)}  {doing(log)}"
                width = shutil.get_terminal_size().columns - 1
                print(f"\r\033[K{line[:width]}", end="", flush=True)
            time.sleep(_PAUSE)
    ended = f"{label}: {duration(time.monotonic() - begun)}{', failed' if status else ''}"
    print(f"\r\033[K{ended}" if shows else ended, flush=True)
    return status


if __name__ == "__main__":
    try:
        sys.exit(run(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
    except KeyboardInterrupt:
        print()
        sys.exit(130)
