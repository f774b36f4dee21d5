"""Where the `modicum` command begins, and what every error ends as: one message, one exit code."""

from __future__ import annotations

import os
import sys

from modicum.core.errors import ModicumError


def run() -> None:
    """Run the command line and leave with its exit code.

    0 done; 2 the input was wrong; 3 it cannot fit; 4 interrupted and resumable; 5 checked and
    found wanting; 1 a bug.
    """
    try:
        from modicum.cli.app import app
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("modicum"):
            raise
        print(
            f"modicum: the command line needs {error.name}: pip install 'modicum[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    try:
        app(prog_name="modicum", standalone_mode=True)
    except ModicumError as error:
        print(f"modicum: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("modicum: interrupted", file=sys.stderr)
        sys.exit(4)
    except BrokenPipeError:
        # Whoever read our output has gone; the interpreter must not complain about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
