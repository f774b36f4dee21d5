"""The process's own streams, whatever they are: closed, full, of few letters, read by nobody.

A closed stream is opened on nothing, or else the next file that is opened would take its number
and get what is printed. Letters that a stream does not have are spelled with those that it has.
"""

from __future__ import annotations

import codecs
import errno
import fcntl
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, TextIO, cast

from modicum.core.errors import InputError

SPELLED = {"─": "-", "━": "-", "│": "|", "×": "x", "–": "-", "−": "-", "…": "...", "✓": "ok"}
_NAMES: dict[str, Literal["r", "w"]] = {"stdin": "r", "stdout": "w", "stderr": "w"}
_SPELL = "modicum.spell"
_CLOSED, _FULL = (errno.EBADF,), (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class OutputLost(OSError):
    """Nothing can be written to standard output; `gone`: whoever read it has left, and knows.

    It has no number, by which typer would take it for its own.
    """

    def __init__(self, error: OSError) -> None:
        self.gone = error.errno == errno.EPIPE
        self.why = (
            "closed" if error.errno in _CLOSED
            else "full" if error.errno in _FULL
            else f"not to be written ({error.strerror})"
        )  # fmt: skip
        super().__init__(self.why)

    def told(self) -> InputError:
        """The one message about it."""
        return InputError(f"standard output is {self.why}; send it somewhere else")


class _Stream:
    """A stream that is distinguished from other files when it cannot be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stream)

    def write(self, text: str) -> int:
        """Write; what cannot be written is lost."""
        with self._watched():
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Push all of it out."""
        with self._watched():
            self._stream.flush()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        with suppress(OSError, ValueError):  # there is nowhere left to report it
            yield


class _Output(_Stream):
    """Standard output: what is lost there is an error of the command's."""

    lost: OutputLost | None = None

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            silence()
            self.lost = OutputLost(error)
            raise self.lost from None


def settle() -> None:
    """Make standard input, output and error fit to be used; more than once does nothing more.

    Streams that somebody has put in place of the process's own are left alone.
    """
    for number, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            # Output that is opened for reading alone stays what it was: nothing can be written.
            opened = os.open(os.devnull, mode)
            if opened == number:
                os.set_inheritable(opened, True)
            else:
                os.dup2(opened, number)
                os.close(opened)
    for number, (name, kind) in enumerate(_NAMES.items()):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, kind, encoding="utf-8", closefd=False))  # noqa: SIM115
    codecs.register_error(_SPELL, _spell)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure") and not isinstance(stream, _Stream):
            stream.reconfigure(errors=_SPELL)
    if sys.stdout is sys.__stdout__ or sys.__stdout__ is None:
        sys.stdout = cast(TextIO, _Output(sys.stdout))
    if sys.stderr is sys.__stderr__ or sys.__stderr__ is None:
        sys.stderr = cast(TextIO, _Stream(sys.stderr))


def refuse_closed() -> None:
    """Find out before any work that standard output is closed.

    Raises:
        OutputLost: so it is.
    """
    if not isinstance(sys.stdout, _Output):
        return
    if fcntl.fcntl(1, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OutputLost(OSError(errno.EBADF, ""))


def finish() -> None:
    """Push out what was printed.

    Raises:
        OutputLost: it cannot be written, or something before it could not.
    """
    sys.stdout.flush()
    if isinstance(sys.stdout, _Output) and sys.stdout.lost is not None:
        raise sys.stdout.lost


def refuse_words(words: Iterable[str]) -> None:
    """Find out before any work that a word of the command line is no text.

    Raises:
        InputError: it is not UTF-8, or not in the letters that this system's names have.
    """
    for place, word in enumerate(words, start=1):
        try:
            word.encode("utf-8")
        except UnicodeEncodeError:
            letters = sys.getfilesystemencoding()
            hint = (
                "" if letters == "utf-8" else f"; names here are in {letters}: PYTHONUTF8=1 helps"
            )
            raise InputError(
                f"word {place} of the command is not UTF-8 text{hint}", value=word
            ) from None


def silence() -> None:
    """Let what is still to come on standard output go nowhere, and the exit be quiet too."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)


def _spell(error: UnicodeError) -> tuple[str, int]:
    """What to write for letters that a stream does not have."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    return "".join(
        SPELLED.get(each) or each.encode("ascii", "backslashreplace").decode() for each in letters
    ), error.end
