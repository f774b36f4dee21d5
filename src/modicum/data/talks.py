"""Conversations before they are written as text, and what is left out of one that is too long.

A conversation is exchanges: a turn of the user and all turns up to the next one. The earliest are
left out first, each as one; system turns stay, and so does all that is written of the others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from modicum.data.chat_template import ChatTemplate, Message, Span, TrainOn


@dataclass(frozen=True)
class Talk:
    """The turns of a conversation and what writes them.

    Args:
        template: writes them as text.
        messages: the turns.
        tools: what the template says of the tools.
        train_on: which turns of the assistant are learned.
        first: the turns before this one are a prompt, of which nothing is learned.

    >>> template = ChatTemplate("{% for m in messages %}{{ m.role }}:{{ m.content }} {% endfor %}")
    >>> said = ["system", "user", "assistant", "user", "assistant"]
    >>> messages = [{"role": role, "content": f"{n}"} for n, role in enumerate(said)]
    >>> talk = Talk(template, messages)
    >>> talk.starts, talk.since(3).written()
    ([1, 3], ('system:0 user:3 assistant:4 ', [(16, 28)]))
    """

    template: ChatTemplate
    messages: Sequence[Message]
    tools: Any = None
    train_on: TrainOn = "all"
    first: int = 0

    @property
    def starts(self) -> list[int]:
        """The user's turns that begin an exchange after which the assistant still says something.

        What stands before the first of them, but for system turns, belongs to its exchange.
        """
        roles = [message.get("role") for message in self.messages]
        if "assistant" not in roles:
            return []
        last = len(roles) - roles[::-1].index("assistant")
        return [number for number in range(last) if roles[number] == "user"]

    def written(self) -> tuple[str, list[Span]]:
        """The text, and the characters of it that are learned.

        Raises:
            InputError: the template does not take the messages.
        """
        return self.template.conversation(
            self.messages, tools=self.tools, train_on=self.train_on, first=self.first
        )

    def since(self, start: int) -> Talk:
        """The conversation from a turn on, with the system turns before it."""
        before = [each for each in self.messages[:start] if each.get("role") == "system"]
        first = max(len(before) + self.first - start, 0)
        return replace(self, messages=[*before, *self.messages[start:]], first=first)

    def without(self, characters: int) -> Talk:
        """The conversation without the first characters of the user's first turn."""
        number = self.starts[0]
        turn = self.messages[number]
        shorter = {**turn, "content": turn["content"][characters:]}
        messages = [*self.messages[:number], shorter, *self.messages[number + 1 :]]
        return replace(self, messages=messages)


class Shorter(NamedTuple):
    """A conversation that fits.

    Args:
        turns: how many were left out.
        truncated: whether the user's first turn lost its beginning.
    """

    talk: Talk
    turns: int
    truncated: bool


def shortened(talk: Talk, fits: Callable[[Talk], bool]) -> Shorter | None:
    """The conversation without so many of its earliest exchanges that it fits.

    Where the last exchange alone does not, the user's turn there loses its beginning, and keeps a
    character at least. None: that does not help either, as the answer is too long.

    Raises:
        InputError: the template does not take the turns that stay.
    """
    starts = talk.starts
    if not starts:
        return None
    later = starts[1:]
    place = bisect_left(later, True, key=lambda start: fits(talk.since(start)))
    kept = talk.since(later[place]) if place < len(later) else talk.since(starts[-1])
    turns = len(talk.messages) - len(kept.messages)
    if place < len(later):
        return Shorter(kept, turns, False)
    length = len(kept.messages[kept.starts[0]]["content"])
    least = bisect_left(range(length), True, key=lambda count: fits(kept.without(count)))
    return Shorter(kept.without(least), turns, True) if least < length else None
