"""Commands run in a process each, at the cost of a fork: a warm process has imported everything.

    python fuzz_zygote.py    # reads a request a line, answers with how it ended

What a fork cannot be equal in is how the interpreter begins: encodings, a missing module, the words
of the interpreter itself. So a share of the inputs runs in fresh processes (`fresh`).
"""

from __future__ import annotations

import codecs
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MEMORY = 12 * 2**30  # of address space; what needs more than a small machine has fails alone


@dataclass(frozen=True)
class Request:
    """A command to run: its words, and where it reads and writes."""

    words: list[str]
    folder: str
    environment: dict[str, str]
    seconds: float
    output: str = "out"
    """"full" and "closed" for such a standard output."""
    typed: str = ""
    logs: str = field(default="")
    """The folder for `out`, `err` and `in`."""


@dataclass(frozen=True)
class Ended:
    """How a command ended; a negative code is a signal's, None that it took too long."""

    code: int | None
    out: str
    err: str


def fresh(request: Request) -> Ended:
    """Run it in a new process."""
    command = [sys.executable, "-m", "modicum", *request.words]
    process = subprocess.Popen(
        [os.fsencode(word) for word in command],
        cwd=request.folder,
        env=request.environment,
        preexec_fn=lambda: _settle(request),
    )
    return _answer(request, _waited(process.pid, request.seconds))


class Zygote:
    """The warm process, as those see it who ask it; started anew when it has gone."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._process: subprocess.Popen[str] | None = None

    def run(self, request: Request) -> Ended:
        """Run it in a fork of the warm process."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=self._environment,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(request)) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("the warm process has died")
        return _answer(request, json.loads(answer)["code"])

    def close(self) -> None:
        """End it."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()


def _answer(request: Request, code: int | None) -> Ended:
    out, err = (_text((Path(request.logs) / name).read_bytes()) for name in ("out", "err"))
    return Ended(code, out, err)


def _text(printed: bytes) -> str:
    """What was printed, in the encoding that PYTHONIOENCODING asked for."""
    wide = printed.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return printed.decode("utf-16" if wide else "utf-8", "replace" if wide else "surrogateescape")


def _settle(request: Request) -> None:
    """In the new process: a group and limits of its own, and the streams that were asked for."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logs = Path(request.logs)
    (logs / "in").write_text(request.typed, encoding="utf-8", errors="surrogateescape")
    for name in ("out", "err"):
        (logs / name).write_bytes(b"")
    for number, path, flags in (
        (0, logs / "in", os.O_RDONLY),
        (1, Path("/dev/full") if request.output == "full" else logs / "out", os.O_WRONLY),
        (2, logs / "err", os.O_WRONLY),
    ):
        opened = os.open(path, flags | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    if request.output == "closed":
        os.close(1)


def _waited(process: int, seconds: float) -> int | None:
    """The exit code of a process and the end of its group; None where it took too long."""
    patience = time.monotonic() + seconds
    code: int | None = None
    while time.monotonic() < patience:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.003)
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    if code is None:
        with suppress(ChildProcessError):
            os.waitpid(process, 0)
    return code


def _child(request: Request) -> None:
    """What a command does between its first line and its exit code."""
    _settle(request)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    sys.argv = sys.orig_argv = ["modicum", *request.words]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _stream(number, request)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    code: Any = 0
    try:
        from modicum.cli.main import run

        run()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = code or 120  # as the interpreter does
    os._exit(code or 0)


def _stream(number: int, request: Request) -> Any:
    if number == 1 and request.output == "closed":
        return None
    if number == 0:
        return open(0, encoding="utf-8", closefd=False)
    errors, buffering = ("strict", -1) if number == 1 else ("backslashreplace", 1)
    return open(number, "w", buffering, encoding="utf-8", errors=errors, closefd=False)


def main() -> None:
    """Import what commands import, then fork for each request."""
    import torch  # noqa: F401

    import modicum.cli.app
    import modicum.cli.train
    import modicum.planner
    import modicum.serve
    import modicum.tasks
    import modicum.trainer  # noqa: F401

    for line in sys.stdin:
        request = Request(**json.loads(line))
        child = os.fork()
        if not child:
            try:
                _child(request)
            finally:
                os._exit(99)
        print(json.dumps({"code": _waited(child, request.seconds)}), flush=True)


if __name__ == "__main__":
    main()
