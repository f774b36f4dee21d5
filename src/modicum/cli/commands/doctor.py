"""`modicum doctor`: what this machine has, and what is wrong with it."""

from __future__ import annotations

from modicum.cli.options import JsonOption


def doctor(as_json: JsonOption = False) -> None:
    """Look at this machine: what it has, what is wrong, what to do.

    Nothing is measured or changed. Ends with exit code 5 when something is wrong.
    """
    from modicum.cli.doctor import run_doctor

    run_doctor(as_json=as_json)
