"""Work that a process of its own does: it finds what this process finds, and answers with JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any

from modicum.core.errors import ModicumError
from modicum.core.machine.probe_line import Waiting
from modicum.core.module_process import python_command

LIMIT_SECONDS = 600
_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_LINES = 5  # of what it printed last, in a message
PAUSE_SECONDS = 0.5  # between two looks at it


class ChildFailed(ModicumError):
    """A process that was started for some work did not do it."""


def answer_of(
    program: str,
    given: Any,
    *,
    work: str,
    limit_seconds: float = LIMIT_SECONDS,
    environment: Mapping[str, str] | None = None,
    waiting: Waiting | None = None,
) -> Any:
    """What a process of its own prints as its last line, read as JSON.

    It is no rank, whatever this process is.

    Args:
        program: statements of Python, for which `given` is there and `json` and `sys` are imported.
        given: plain values.
        work: what it does, as errors call it: `tracing the model`.
        limit_seconds: without a line on its standard error, after which it is ended.
        environment: variables that are other ones than here.
        waiting: hears twice a second how many seconds it has run, and how many lines are on its
            standard error.

    Raises:
        ChildFailed: it could not be started, took too long, ended badly or answered no JSON, with
            what it printed last.

    >>> answer_of("print(json.dumps(given + 1))", 2, work="adding")
    3
    """
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                python_command(program, given),
                env=environment_of_child() | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        except OSError as error:
            raise ChildFailed(f"no process could be started for {work}: {error}") from None
        with process:
            try:
                output = _output(process, errors, work, limit_seconds, waiting)
            except BaseException:
                process.kill()
                raise
        said = said_so_far(errors)
    with suppress(ValueError, IndexError):
        if process.returncode == 0:
            return json.loads(output.splitlines()[-1])
    raise ended_badly(work, process.returncode, said or output)


def ended_badly(work: str, status: int, said: str) -> ChildFailed:
    """The error of a process that ended without an answer."""
    if status < 0:
        return ChildFailed(f"{work} was ended by {signal_name(-status)}, from outside")
    last = "\n".join(said.splitlines()[-_LINES:])
    return ChildFailed(f"{work} failed:\n{last}")


def environment_of_child() -> dict[str, str]:
    """The variables of a process that is no rank, whatever this one is."""
    return {name: value for name, value in os.environ.items() if name not in _RANK}


def signal_name(number: int) -> str:
    """A signal as people call it.

    >>> signal_name(15), signal_name(4000)
    ('SIGTERM', 'signal 4000')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _output(
    process: subprocess.Popen[str],
    errors: IO[bytes],
    work: str,
    limit_seconds: float,
    waiting: Waiting | None,
) -> str:
    """What a process prints until it ends.

    Raises:
        ChildFailed: it has said nothing on its standard error for longer than it may.
    """
    begun = heard = time.monotonic()
    lines = 0
    while True:
        try:
            return process.communicate(timeout=min(PAUSE_SECONDS, limit_seconds))[0]
        except subprocess.TimeoutExpired:
            now, before, lines = time.monotonic(), lines, said_so_far(errors).count("\n")
            heard = now if lines > before else heard
            if now - heard > limit_seconds:
                raise ChildFailed(f"{work} took over {limit_seconds} s for a part of it") from None
            if waiting is not None:
                waiting(now - begun, lines)


def said_so_far(errors: IO[bytes]) -> str:
    """All that is in a file, while another process may write to it."""
    length = os.fstat(errors.fileno()).st_size
    return os.pread(errors.fileno(), length, 0).decode("utf-8", "replace")
