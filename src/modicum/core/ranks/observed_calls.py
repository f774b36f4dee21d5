"""Each exchange of this process as a record, for whoever asks; nothing is kept where nobody does.

Who asks is on a list here; `modicum.core.ranks.observed_groups.observing` puts them there, and has
process groups show their calls.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class ObservedCall:
    """One call of this rank in a process group.

    Args:
        sequence: how many calls this rank issued in the group before it.
        kind: `all-reduce`, `all-gather`, ...; of a message from one rank to another `send` and
            `recv`, each at its end.
        group: the group's name, the same on all of its ranks; of a message `link_name`.
        members: the ranks of the group, as the default group numbers them; of a message who sends
            it, and who receives it.
        label: whose values travel, such as `layers.17`; empty where nobody said.
        bytes: what this rank sends, by the formula of a ring; nothing where it receives a message.
        asked: when the call was asked for, in seconds of this host's monotonic clock, as are
            `begun`, when it was issued, and `ended`, which is no number until its result is there.
        waited: seconds for which this process waited for it; 0 for waits in C++, as DDP's.
        due: before which it does not end, on a pretended link.
        awaited: since when this process waits for it, of a message alone; else no number.
    """

    sequence: int
    kind: str
    group: str
    members: tuple[int, ...]
    label: str
    bytes: int
    asked: float
    begun: float
    ended: float = math.nan
    waited: float = 0.0
    due: float = -math.inf
    awaited: float = math.nan

    @property
    def done(self) -> bool:
        """Whether its result is there."""
        return not math.isnan(self.ended)


class CallObserver(Protocol):
    """What is shown calls. Its members may be called by any thread, also of a library."""

    def began(self, call: ObservedCall) -> None:
        """A call was issued."""

    def changed(self, call: ObservedCall) -> None:
        """A call has ended, or was waited for."""


class CallLog:
    """An observer that keeps all calls, in the order in which they were issued."""

    def __init__(self) -> None:
        self.calls: list[ObservedCall] = []

    def began(self, call: ObservedCall) -> None:
        """Keep it."""
        self.calls.append(call)

    def changed(self, call: ObservedCall) -> None:
        """Nothing: the record is the one that is kept."""


@dataclass(frozen=True, slots=True)
class CallNote:
    """What the engine knows of the call that it issues; a process group sees other tensors."""

    kind: str
    label: str
    bytes: int
    asked: float
    due: float = -math.inf


# A message from one rank to another, as each of them sees it.
SEND, RECEIVE = "send", "recv"
MESSAGES = (SEND, RECEIVE)


def link_name(group: str, source: int, target: int, tag: int = 0) -> str:
    """What the messages from one rank to another in a group are counted under, at both ends.

    >>> link_name("0", 1, 2), link_name("0", 1, 2, tag=7)
    ('0 1>2', '0 1>2 #7')
    """
    return f"{group} {source}>{target}" + (f" #{tag}" if tag else "")


def is_link(group: str) -> bool:
    """Whether a name is that of a link: what `link_name` gives."""
    return ">" in group


# What ranks exchange to agree on something (counts, signals, who has a gradient); no ledger has it.
AGREEMENT = "agreement"


def label_of(names: Sequence[str]) -> str:
    """Parameters that travel together, for people: the module of the first, and of the last.

    >>> label_of(["layers.17.weight", "layers.17.bias", "layers.16.weight"])
    'layers.17 to layers.16'
    """
    ends = [names[at].rpartition(".")[0] or names[at] for at in (0, -1)] if names else [""]
    return " to ".join(dict.fromkeys(ends))


_observers: list[CallObserver] = []
_local = threading.local()


def listed(observer: CallObserver, *, seeing: bool) -> bool:
    """Put an observer on the list of those who ask, or take it away; whether anybody asks now."""
    (_observers.append if seeing else _observers.remove)(observer)
    return bool(_observers)


def observed() -> bool:
    """Whether anybody asks for calls."""
    return bool(_observers)


@contextmanager
def noting(note: CallNote) -> Iterator[None]:
    """Have the call that this thread issues in the block be recorded as this."""
    before, _local.note = noted(), note
    try:
        yield
    finally:
        _local.note = before


def naming(label: str) -> AbstractContextManager[None]:
    """Have the calls that this thread issues in the block be recorded under a label."""
    return _named(label) if observed() else nullcontext()


@contextmanager
def _named(label: str) -> Iterator[None]:
    before, _local.label = named(), label
    try:
        yield
    finally:
        _local.label = before


def named() -> str:
    """The label of the calls that this thread issues; empty: nobody said."""
    return getattr(_local, "label", "")


def noted() -> CallNote | None:
    """What is known of the call that this thread issues."""
    return getattr(_local, "note", None)


def show_begun(call: ObservedCall) -> tuple[CallObserver, ...]:
    """Show a call to all who ask; who they are."""
    seeing = tuple(_observers)
    for observer in seeing:
        observer.began(call)
    return seeing


def show_ended(call: ObservedCall, seeing: tuple[CallObserver, ...]) -> None:
    """Note that a call has ended, once, and show it to those who saw it begin."""
    if not call.done:
        call.ended = max(time.monotonic(), call.due)
        for observer in seeing:
            observer.changed(call)
