"""Where the `modicum` command begins, and what every error ends as: one message, one exit code."""

from __future__ import annotations

import os
import signal
import sys

from modicum.core.errors import ModicumError

EXTRAS = ("jinja2", "matplotlib", "rich", "tokenizers", "typer", "yaml")


def run() -> None:
    """Run the command line and leave with its exit code.

    0 done; 2 the input was wrong; 3 it cannot fit; 4 interrupted and resumable; 5 checked and
    found wanting; 1 a bug.
    """
    # SIGTERM ends a command as Ctrl-C does; a run in progress has handlers of its own, and saves.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from modicum.cli.app import app

        app(prog_name="modicum")
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        print(f"modicum: this needs {error.name}: pip install 'modicum[cli]'", file=sys.stderr)
        sys.exit(2)
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
