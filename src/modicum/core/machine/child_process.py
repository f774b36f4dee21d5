"""Work that a process of its own does: it finds what this process finds, and answers with JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from modicum.core.errors import ModicumError

LIMIT_SECONDS = 600
_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# What this process finds, and nothing of the current folder before it.
_PATHS = (
    "import json, sys; paths, given = json.loads(sys.argv[1]); "
    "sys.path += [path for path in paths if path not in sys.path]; "
)
_LINES = 5  # of what it printed last, in a message


class ChildFailed(ModicumError):
    """A process that was started for some work did not do it."""


def answer_of(
    program: str,
    given: Any,
    *,
    work: str,
    limit_seconds: float = LIMIT_SECONDS,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """What a process of its own prints as its last line, read as JSON.

    It is no rank, whatever this process is.

    Args:
        program: statements of Python, for which `given` is there and `json` and `sys` are imported.
        given: plain values.
        work: what it does, as errors call it: `tracing the model`.
        limit_seconds: after which it is ended.
        environment: variables that are other ones than here.

    Raises:
        ChildFailed: it could not be started, took too long, ended badly or answered no JSON, with
            what it printed last.

    >>> answer_of("print(json.dumps(given + 1))", 2, work="adding")
    3
    """
    own = {name: value for name, value in os.environ.items() if name not in _RANK}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _PATHS + program, json.dumps([sys.path, given])],
            env=own | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_seconds,
        )
    except subprocess.TimeoutExpired:
        raise ChildFailed(f"{work} took over {limit_seconds} s") from None
    except OSError as error:
        raise ChildFailed(f"no process could be started for {work}: {error}") from None
    with suppress(ValueError, IndexError):
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
    last = "\n".join((done.stderr or done.stdout).splitlines()[-_LINES:])
    raise ChildFailed(f"{work} failed:\n{last}")
