"""A process of its own that answers one question after another: it imports once."""

from __future__ import annotations

import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from threading import RLock
from typing import IO, Any

from modicum.core.machine.child_process import (
    LIMIT_SECONDS,
    PAUSE_SECONDS,
    ChildFailed,
    ended_badly,
    environment_of_child,
    said_so_far,
)
from modicum.core.module_process import python_command

IDLE_SECONDS = 30
_PROGRAM = "from modicum.core.machine.answering_process import answer_all; answer_all(*given)"
_READ_BYTES = 1 << 20


class AnsweringProcess:
    """A function that another process runs: one for all questions within a context.

    It is started with the first question. It ends with the outermost context, when nothing was
    asked for a while, with `end`, and with this process. Another one is started where this process
    has changed its folder since, or was forked. A question outside of a context has one of its own.
    Threads ask one after the other.

    Args:
        function: `module:function`, from plain values to plain values, as JSON has them.
        work: what it does, as errors call it.
        idle_seconds: without a question, after which it ends.
        limit_seconds: without a line on its standard error, after which a question is given up.

    >>> with AnsweringProcess("math:factorial", work="counting") as counting:
    ...     [counting.ask(number) for number in (3, 4)]
    [6, 24]
    """

    def __init__(
        self,
        function: str,
        *,
        work: str,
        idle_seconds: float = IDLE_SECONDS,
        limit_seconds: float = LIMIT_SECONDS,
    ) -> None:
        self._given = [function, idle_seconds]
        self._work, self._limit = work, limit_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._begun_in: Any = None
        self._turn, self._contexts = RLock(), 0

    def __enter__(self) -> AnsweringProcess:
        with self._turn:
            self._contexts += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._turn:
            self._contexts -= 1
            if not self._contexts:
                self.end()

    def ask(self, question: Any) -> Any:
        """The answer to a question.

        Raises:
            ChildFailed: it could not be started, took too long or ended badly, with what it
                printed last. The next question is asked of a new one.
        """
        line = json.dumps(question).encode() + b"\n"
        with self._turn, self:
            for last_try in (False, True):
                process = self._started()
                try:
                    assert process.stdin is not None
                    with suppress(BrokenPipeError):
                        process.stdin.write(line)
                        process.stdin.flush()
                    if answer := self._heard(process):
                        return json.loads(answer)
                    status, said = process.wait(), said_so_far(self._file)
                except BaseException:
                    self.end()
                    raise
                self.end()
                if status or last_try:  # with 0 it had just waited long enough: another is started
                    raise ended_badly(self._work, status, said)
        raise AssertionError("one of two tries returns or raises")

    def end(self) -> None:
        """End the process, if there is one."""
        with self._turn:
            process, self._process = self._process, None
            if process is not None and self._begun_in[0] == os.getpid():
                assert process.stdin is not None
                assert process.stdout is not None
                with suppress(BrokenPipeError):
                    process.stdin.close()
                process.kill()
                process.wait()
                process.stdout.close()
                self._file.close()

    @property
    def _file(self) -> IO[bytes]:
        assert self._errors is not None
        return self._errors

    def _started(self) -> subprocess.Popen[bytes]:
        here = os.getpid(), os.getcwd()
        if self._process is not None and self._process.poll() is None and self._begun_in == here:
            return self._process
        self.end()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                python_command(_PROGRAM, self._given),
                env=environment_of_child(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
            )
        except OSError as error:
            self._file.close()
            raise ChildFailed(f"no process could be started for {self._work}: {error}") from None
        self._begun_in = here
        return self._process

    def _heard(self, process: subprocess.Popen[bytes]) -> bytes:
        """One line of a process; nothing where it ended before."""
        assert process.stdout is not None
        file, found, lines, heard = process.stdout.fileno(), b"", 0, time.monotonic()
        waits = select.poll()  # `select` knows no files beyond the first 1024
        waits.register(file, select.POLLIN)
        while not found.endswith(b"\n"):
            if waits.poll(1000 * min(PAUSE_SECONDS, self._limit)):
                if not (read := os.read(file, _READ_BYTES)):
                    return b""
                found += read
                continue
            before, lines = lines, said_so_far(self._file).count("\n")
            heard = time.monotonic() if lines > before else heard
            if time.monotonic() - heard > self._limit:
                raise ChildFailed(f"{self._work} took over {self._limit} s for a part of it")
        return found


def answer_all(function: str, idle_seconds: float) -> None:
    """What the process does: read a question a line, print an answer a line."""
    questions = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())  # a debugger's prompt waits for no question
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what others print is no answer
    module, _, name = function.partition(":")
    answer = getattr(importlib.import_module(module), name)
    while select.select([questions], [], [], idle_seconds)[0]:
        if not (line := questions.readline()):
            return
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()
