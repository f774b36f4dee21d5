"""`modicum chat`: what is printed of what a model writes."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from modicum.cli.chat import converse

SAID = "a\x1b]0;title\x07b\n🙂"


class Terminal(io.StringIO):
    """A stream that says that it is one."""

    def isatty(self) -> bool:
        return True


class Conversation:
    """One with a model that writes codes which set a terminal's title."""

    template = ""

    def write(self, prompt: str, **options: Any) -> Iterator[str]:
        yield SAID


def test_a_terminal_gets_no_codes_that_a_model_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation: Any = Conversation()
    for stream, expected in ((Terminal(), "a␛]0;title␇b\n🙂\n"), (io.StringIO(), f"{SAID}\n")):
        monkeypatch.setattr(sys, "stdout", stream)
        converse(conversation, "x", {})
        assert stream.getvalue() == expected
