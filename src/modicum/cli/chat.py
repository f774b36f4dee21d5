"""`modicum chat`: text in, text out, in a terminal or a pipe."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from modicum.core.errors import InputError

if TYPE_CHECKING:
    from modicum.serve import Conversation

HELP = "Text to continue, a line at a time. /new begins anew, /quit (or Ctrl-D) ends."


def converse(conversation: Conversation, prompt: str | None, options: dict[str, Any]) -> None:
    """Continue one prompt, or what is typed until the end of input."""
    if prompt is not None:
        print(prompt, end="", flush=True)
        _write(conversation, prompt, options)
        return
    asking = sys.stdin.isatty()
    if asking:
        print(HELP)
    while True:
        try:
            text = input("> " if asking else "")
            text.encode("utf-8")
        except EOFError:
            return
        except UnicodeError:
            raise InputError("what was typed is not UTF-8 text", field="standard input") from None
        if text.strip() == "/quit":
            return
        if text.strip() == "/new":
            conversation.forget()
        elif text:
            _write(conversation, text, options)


def _write(conversation: Conversation, prompt: str, options: dict[str, Any]) -> None:
    for piece in conversation.write(prompt, **options):
        print(piece, end="", flush=True)
    print(flush=True)
