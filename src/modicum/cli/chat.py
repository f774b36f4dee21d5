"""`modicum chat`: text in, text out, in a terminal or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from modicum.core.errors import InputError

if TYPE_CHECKING:
    from modicum.serve import Conversation

HELP = (
    "{what}; a \\ at the end takes one more line. /new begins anew; /quit, Ctrl-D or Ctrl-C ends."
)


def converse(conversation: Conversation, prompt: str | None, options: dict[str, Any]) -> None:
    """Continue one prompt, or what is typed until the end of input."""
    if prompt is not None:
        if conversation.template is None:
            print(prompt, end="", flush=True)
        _write(conversation, prompt, options)
        return
    asking = sys.stdin.isatty()
    if asking:
        answers = conversation.template is not None
        print(HELP.format(what="What to answer" if answers else "Text to continue"))
    _answer_each(conversation, options, asking)
    if asking:
        print("ended")


def _answer_each(conversation: Conversation, options: dict[str, Any], asking: bool) -> None:
    """Answer until the end of input, or until somebody at a terminal ends it."""
    while True:
        try:
            text = _typed(asking)
        except EOFError:
            if asking:
                print()  # the prompt's line is not ended
            return
        except KeyboardInterrupt:
            if not asking:
                raise
            print()
            return
        except UnicodeError:
            raise InputError("what was typed is not UTF-8 text", field="standard input") from None
        if text.strip() == "/quit":
            return
        if text.strip() == "/new":
            conversation.forget()
        elif text:
            with _ended_by_ctrl_c() if asking else nullcontext():
                _write(conversation, text, options)


def _typed(asking: bool) -> str:
    """What was typed: a line, and others after a line that ends with a backslash."""
    text = input("> " if asking else "")
    while asking and text.endswith("\\"):
        text = text[:-1] + "\n" + input(". ")
    text.encode("utf-8")
    return text


@contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Ctrl-C ends the answer, not the conversation."""
    try:
        yield
    except KeyboardInterrupt:
        print(flush=True)


def _write(conversation: Conversation, prompt: str, options: dict[str, Any]) -> None:
    for piece in conversation.write(prompt, **options):
        print(piece, end="", flush=True)
    print(flush=True)
