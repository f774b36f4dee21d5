"""Where the `modicum` command begins, and what every error ends as: one message, one exit code."""

from __future__ import annotations

import os
import signal
import sys
from importlib.util import find_spec

from modicum.core.errors import ModicumError

# What the extra `cli` brings, by the names that are imported.
EXTRA = ("jinja2", "matplotlib", "rich", "tokenizers", "typer", "yaml")


def run() -> None:
    """Run the command line and leave with its exit code.

    0 done; 2 the input was wrong; 3 it cannot fit; 4 interrupted and resumable; 5 checked and
    found wanting; 1 a bug.
    """
    # Said before a run of hours, not after it.
    missing = [name for name in EXTRA if find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        print(
            f"modicum: the command line needs {names}: pip install 'modicum[cli]'", file=sys.stderr
        )
        sys.exit(2)
    # Threads that wait for others yield their core soon. By default they spin: beside one other
    # busy process on two cores a step took 0.34 s so and 0.24 s with this; alone, as long.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # SIGTERM ends a command as Ctrl-C does; a run in progress has handlers of its own, and saves.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from modicum.cli.app import app

        app(prog_name="modicum")
    except ModicumError as error:
        print(f"modicum: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("modicum: interrupted", file=sys.stderr)
        sys.exit(4)
