"""`modicum chat`: text in, text out, in a terminal or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from modicum.core.errors import InputError
from modicum.report.words import visible

if TYPE_CHECKING:
    from modicum.serve import Conversation
    from modicum.serve.adapter_choice import AdapterChoice

HELP = (
    "{what}; a \\ at the end takes one more line. /new begins anew; /quit, Ctrl-D or Ctrl-C ends."
)

MORE = "/adapter NAME, or NAME=0.7 OTHER=0.3, changes the adapter: {choice}"


def converse(
    conversation: Conversation,
    prompt: str | None,
    options: dict[str, Any],
    choice: AdapterChoice | None = None,
) -> None:
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
        if choice is not None:
            print(MORE.format(choice=choice))
    _answer_each(conversation, options, asking, choice)
    if asking:
        print("ended")


def _answer_each(
    conversation: Conversation,
    options: dict[str, Any],
    asking: bool,
    choice: AdapterChoice | None,
) -> None:
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
        elif choice is not None and text.split()[:1] == ["/adapter"]:
            _choose(choice, text.split()[1:], asking)
        elif text:
            with _ended_by_ctrl_c() if asking else nullcontext():
                _write(conversation, text, options)


def _choose(choice: AdapterChoice, words: list[str], asking: bool) -> None:
    """Change the adapters; at a terminal, say what there is, and a wrong word ends nothing."""
    try:
        if words or not asking:
            choice.use(words)
    except InputError as error:
        if not asking:
            raise
        print(error)
    if asking:
        print(choice)


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
    """Print what a model writes; a terminal gets no codes that would control it."""
    terminal = sys.stdout.isatty()
    for piece in conversation.write(prompt, **options):
        print(visible(piece) if terminal else piece, end="", flush=True)
    print(flush=True)
