"""Which examples share a row: first-fit decreasing over a look-ahead, by lengths alone.

Examples are taken in an order that the seed decides, some thousands at a time. Of these the longest
is placed first, each in the first row that has room for it. What is longer than a row is handled by
a policy. Knows neither tokens nor files, so a plan counts with it what a run will do.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

TooLong = Literal["truncate", "split", "drop", "refuse"]
LOOK_AHEAD = 4096


class Example(NamedTuple):
    """What packing knows of an example.

    Args:
        length: tokens, the end among them.
        prompt: tokens before the first one that is trained.
        trained: tokens that are.
    """

    length: int
    prompt: int
    trained: int


class Piece(NamedTuple):
    """A part of a row: inputs of one example.

    Args:
        example: its number.
        start: its first token that is an input.
        width: inputs.
        head: so many inputs are the example's first tokens, which a truncated prompt keeps ...
        skip: ... and so many tokens of the prompt are left out after them.
    """

    example: int
    start: int
    width: int
    head: int = 0
    skip: int = 0


@dataclass(frozen=True)
class PackingCounts:
    """What packing made of the examples.

    Args:
        documents: examples, or documents of continuous text, that there are.
        rows: how many rows they make.
        positions: inputs of all rows together, of which `filled` hold a token.
        trained: tokens that are trained.
        truncated: examples that lost the front of their prompt.
        split: examples that go over several rows.
        dropped: examples that are not trained, as they are too long for a row.
    """

    documents: int
    rows: int
    positions: int
    filled: int
    trained: int
    truncated: int = 0
    split: int = 0
    dropped: int = 0

    @property
    def waste(self) -> float:
        """The share of inputs that are padding."""
        return 1 - self.filled / self.positions if self.positions else 0.0

    def as_json(self) -> dict[str, Any]:
        """All of it, as run.json and plan.jsonl have it."""
        return {**vars(self), "waste": round(self.waste, 4)}


def too_long_words(counts: Mapping[str, Any]) -> str:
    """What becomes of examples that are longer than a row, for people; empty where none is.

    Args:
        counts: as a plan and run.json have them.

    >>> too_long_words({"truncated": 2, "split": 0, "dropped": 1})
    '2 truncated at the front of their prompt, 1 dropped'
    """
    end = "at their end" if "classes" in counts else "at the front of their prompt"
    words = (
        ("shortened", "without their earliest turns"),
        ("truncated", f"truncated {end}"),
        ("split", "split over several rows"),
        ("dropped", "dropped"),
    )
    return ", ".join(f"{counts[key]:,} {said}" for key, said in words if counts.get(key))


def row_room(sequence_length: int, boundaries: bool) -> int:
    """Tokens of the longest example that a row holds; its last is no input where it stands alone.

    >>> row_room(64, boundaries=True)
    65
    """
    return sequence_length + int(boundaries)


@dataclass
class Fitting:
    """Rows of pieces.

    Attributes:
        table: the fields of all pieces, row by row.
        ends: how many pieces there are up to each row's end, a 0 in front.
        filled: inputs that hold a token.
        trained: tokens that are trained of the examples that are not dropped.

    Args:
        sequence_length: inputs of a row.
        boundaries: whether attention keeps examples apart: then an example's last token, which
            predicts nothing, is no input.
        too_long: truncate: drop tokens at the front of the prompt; split: over several rows; drop:
            leave the example out; refuse: there are none such. What has no prompt is split where
            prompts are truncated.
        begin: the first tokens of an example, such as `<s>`, that a truncated prompt keeps.
    """

    sequence_length: int
    boundaries: bool = True
    too_long: TooLong = "truncate"
    begin: int = 0
    table: array[int] = field(default_factory=lambda: array("q"))
    ends: array[int] = field(default_factory=lambda: array("q", [0]))
    filled: int = 0
    trained: int = 0
    truncated: int = 0
    split: int = 0
    dropped: int = 0

    def fit(self, examples: Iterable[tuple[int, Example]]) -> None:
        """Place all examples, each with its number, `LOOK_AHEAD` pieces at a time."""
        ahead: list[Piece] = []
        for number, example in examples:
            pieces = self.pieces(number, example)
            self.trained += example.trained if pieces else 0
            ahead += pieces
            if len(ahead) >= LOOK_AHEAD:
                self._place(ahead)
                ahead = []
        self._place(ahead)

    def pieces(self, number: int, example: Example) -> list[Piece]:
        """The pieces of one example, by the policy where it is longer than a row."""
        if not example.trained:
            return []
        width, room = example.length - int(self.boundaries), self.sequence_length
        if width <= room:
            return [Piece(number, 0, width)]
        prompted = example.prompt > self.begin
        if self.too_long == "split" or (self.too_long == "truncate" and not prompted):
            self.split += 1
            return list(self._split(number, example, width))
        skip = width - room
        # At least one token of the prompt stays, or the answer would answer nothing.
        if self.too_long == "truncate" and example.prompt - self.begin > skip:
            self.truncated += 1
            return [Piece(number, 0, room, self.begin, skip)]
        self.dropped += 1
        return []

    def _split(self, number: int, example: Example, width: int) -> Iterator[Piece]:
        for start in range(0, width, self.sequence_length):
            end = min(start + self.sequence_length, width)
            if end >= example.prompt:  # else none of its labels is trained
                yield Piece(number, start, end - start)

    def _place(self, pieces: list[Piece]) -> None:
        fitted = first_fit_decreasing([piece.width for piece in pieces], self.sequence_length)
        # In the order of their first examples, not with the longest in front: an evaluation looks
        # at the first rows.
        for row in sorted(sorted(pieces[place] for place in places) for places in fitted):
            for piece in row:
                self.table.extend(piece)
                self.filled += piece.width
            self.ends.append(self.ends[-1] + len(row))

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.ends) - 1


def first_fit_decreasing(widths: Sequence[int], room: int) -> list[list[int]]:
    """Which of `widths` share a row of `room`: the widest first, each in the first that has room.

    Args:
        widths: none of them above `room`.

    >>> first_fit_decreasing([2, 5, 4, 1, 3], room=6)
    [[1, 3], [2, 0], [4]]
    """
    leaves = 1 << max(len(widths) - 1, 0).bit_length()
    # A tree over the rows: each node has the largest room below it.
    free = array("q", [room]) * (2 * leaves)
    rows: list[list[int]] = [[] for _ in widths]
    for number in sorted(range(len(widths)), key=lambda place: -widths[place]):
        node, width = 1, widths[number]
        while node < leaves:
            node *= 2
            node += free[node] < width
        rows[node - leaves].append(number)
        free[node] -= width
        while node > 1:
            node //= 2
            free[node] = max(free[2 * node], free[2 * node + 1])
    return [row for row in rows if row]
