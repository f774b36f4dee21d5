"""What an agent says of the ranks of its host, and what it is answered: strict JSON, a line each.

Lines are of bounded size. Only numbers, short words and durations travel, and in an answer a
sentence for people. A rank's own clock stands in `ended`, which is compared with nothing but other
values of the same rank. Whatever is not exactly of this form is refused. Nothing here imports
torch.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

MOST_BYTES = 1 << 18
MOST_EVENT_BYTES = 1 << 14
MOST_CALLS, MOST_OPEN, MOST_GROUPS = 256, 16, 64
PROCESS = ("running", "stopped", "dead")
# The event after which a controller that falls silent surprises nobody: its own ranks have ended.
OVER: dict[str, Any] = {"over": True}


@dataclass(frozen=True)
class DoneCall:
    """A call that has ended: seconds that it took, and when it ended on its rank's clock.

    Seconds for which the rank `waited` for it are known of messages, and of calls that end when
    they are waited for.
    """

    group: str
    sequence: int
    kind: str
    label: str
    bytes: int
    seconds: float
    ended: float
    marked: bool
    waited: float = 0.0


@dataclass(frozen=True)
class OpenCall:
    """A call that has not ended, and the seconds since it begun; a message's that it is waited for.

    A message for which its rank does not wait is none of the open ones. `bytes` are what this rank
    sends: 0 where it receives.
    """

    group: str
    sequence: int
    kind: str
    label: str
    seconds: float
    bytes: int = 0


@dataclass(frozen=True)
class RankReport:
    """What a rank's ring and its process say.

    Args:
        process: running, stopped or dead; `process_seconds` since when, as its agent saw it.
        beat_seconds: since a thread of it last ran.
        starved: the share of the last seconds in which its main thread was ready to run and had no
            processor, as other programs had them; 0 where the system does not count that.
        left: how it left (`modicum.core.ranks.call_ring`), `words` why.
        entered: how many calls it has issued, by group.
        members: the ranks of each group.
        unawaited: messages that are under way, and for which the rank does not wait: the oldest.
    """

    rank: int
    host: str
    process: str
    process_seconds: float
    beat_seconds: float
    starved: float
    left: int
    words: str
    marked: bool
    place: str
    entered: dict[str, int]
    members: dict[str, tuple[int, ...]]
    open: tuple[OpenCall, ...]
    done: tuple[DoneCall, ...]
    unawaited: tuple[OpenCall, ...] = ()


def report_line(reports: list[RankReport]) -> bytes:
    """The reports as a message."""
    return json.dumps([asdict(report) for report in reports], allow_nan=False).encode() + b"\n"


def parse_reports(line: bytes, size: int) -> list[RankReport]:
    """The reports of a message, checked.

    Args:
        size: how many ranks there are.

    Raises:
        ValueError: it is not exactly what `report_line` writes of ranks below `size`.

    >>> parse_reports(b"[]", 2)
    []
    """
    return [_report(one, size) for one in _items(_value(line, MOST_BYTES), size)]


def parse_ranks(line: bytes, size: int) -> set[int]:
    """The ranks of an agent, below `size`.

    Raises:
        ValueError: it is no list of some.

    >>> parse_ranks(b"[1, 0]", 2)
    {0, 1}
    """
    given = _items(_value(line, MOST_BYTES), size)
    if not given:
        raise ValueError("no rank")
    return {_count(rank, size - 1) for rank in given}


def parse_event(line: bytes) -> dict[str, Any]:
    """What a controller says, checked: a `sentence` of one line, and whether it `ends` the run.

    More words, numbers and flags may stand there. `{}` says that the controller is there.

    Raises:
        ValueError: it is nothing of the kind, nor `OVER`.

    >>> parse_event(b'{"sentence": "rank 1 is dead", "ends": true}')["ends"]
    True
    """
    event = _value(line, MOST_EVENT_BYTES)
    if not isinstance(event, dict):
        raise ValueError("no event")
    for name, value in event.items():
        _word(name, 64)
        if isinstance(value, str):
            _word(value, MOST_EVENT_BYTES)
        elif type(value) not in (bool, int, float) or not -math.inf < value < math.inf:
            raise ValueError("neither a word, a number nor a flag")
    if event not in ({}, OVER):
        _word(event.get("sentence"), MOST_EVENT_BYTES)
        _flag(event.get("ends"))
    return event


def _value(line: bytes, most: int) -> Any:
    if len(line) > most:
        raise ValueError(f"a message of more than {most} bytes")
    try:
        return json.loads(line, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _report(given: Any, size: int) -> RankReport:
    _keys(given, RankReport)
    process = _word(given["process"], 8)
    if process not in PROCESS:
        raise ValueError("no such state of a process")
    if not isinstance(given["entered"], dict) or not isinstance(given["members"], dict):
        raise ValueError("groups are no object")
    if max(len(given["entered"]), len(given["members"])) > MOST_GROUPS:
        raise ValueError("too many groups")
    return RankReport(
        rank=_count(given["rank"], size - 1),
        host=_word(given["host"], 255),
        process=process,
        process_seconds=_seconds(given["process_seconds"]),
        beat_seconds=_seconds(given["beat_seconds"]),
        starved=_share(given["starved"]),
        left=_count(given["left"], 3),
        words=_word(given["words"], 240),
        marked=_flag(given["marked"]),
        place=_word(given["place"], 160),
        entered={_word(name, 255): _count(n) for name, n in given["entered"].items()},
        members={
            _word(name, 255): tuple(_count(rank, size - 1) for rank in _items(ranks, size))
            for name, ranks in given["members"].items()
        },
        open=tuple(_open(call) for call in _items(given["open"], MOST_OPEN)),
        done=tuple(_done(call) for call in _items(given["done"], MOST_CALLS)),
        unawaited=tuple(_open(call) for call in _items(given["unawaited"], MOST_OPEN)),
    )


def _open(given: Any) -> OpenCall:
    _keys(given, OpenCall)
    return OpenCall(*_which(given), _seconds(given["seconds"]), _count(given["bytes"]))


def _done(given: Any) -> DoneCall:
    _keys(given, DoneCall)
    times = (_seconds(given["seconds"]), _seconds(given["ended"]))
    more = (_flag(given["marked"]), _seconds(given["waited"]))
    return DoneCall(*_which(given), _count(given["bytes"]), *times, *more)


def _which(given: Any) -> tuple[str, int, str, str]:
    names = (_word(given["kind"], 16), _word(given["label"], 64))
    return _word(given["group"], 255), _count(given["sequence"]), *names


def _keys(given: Any, kind: type) -> None:
    if not isinstance(given, dict) or set(given) != set(kind.__annotations__):
        raise ValueError(f"no {kind.__name__}")


def _items(given: Any, most: int) -> list[Any]:
    if not isinstance(given, list) or len(given) > most:
        raise ValueError(f"no list of {most} at most")
    return given


def _count(given: Any, most: int = 1 << 62) -> int:
    if type(given) is not int or not 0 <= given <= most:
        raise ValueError(f"no integer of 0 to {most}")
    return given


def _seconds(given: Any) -> float:
    # Compared as it is: an integer may be larger than any float.
    if type(given) not in (int, float) or not -1 <= given < 1e12:
        raise ValueError("no seconds")
    return float(given)


def _share(given: Any) -> float:
    if not 0 <= (share := _seconds(given)) <= 1:
        raise ValueError("no share of 0 to 1")
    return share


def _flag(given: Any) -> bool:
    if type(given) is not bool:
        raise ValueError("neither true nor false")
    return given


def _word(given: Any, most: int) -> str:
    if not isinstance(given, str) or len(given) > most or not given.isprintable():
        raise ValueError(f"no line of {most} letters at most")
    return given


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no number")
