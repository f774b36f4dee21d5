"""Which parts of a recipe's data are held out, and how: the same fields in every section."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from modicum.core.errors import InputError
from modicum.data.parts import HELD, Draw
from modicum.data.sources import Source


class HoldsOut(Protocol):
    """A section that says what is held out: `data`, or a task with data of its own."""

    @property
    def validation_path(self) -> str | None:
        """Data of its own for the validation."""

    @property
    def validation_fraction(self) -> float:
        """Else so much of the training data."""

    @property
    def test_path(self) -> str | None:
        """Data of its own for the test."""

    @property
    def test_fraction(self) -> float:
        """Else so much of the training data."""


def paths_of(asked: HoldsOut) -> dict[str, str]:
    """The parts that have data of their own, and where that is."""
    found = {part: getattr(asked, f"{part}_path") for part in HELD}
    return {part: path for part, path in found.items() if path is not None}


def draw_of(asked: HoldsOut, seed: int) -> Draw:
    """What is drawn for the parts that have no data of their own."""
    drawn = Draw(asked.validation_fraction, asked.test_fraction, seed)
    return drawn.without(paths_of(asked))


def field_of_part(asked: HoldsOut, part: str, section: str = "data") -> str:
    """The recipe's field that says what is in a part that is held out."""
    return f"{section}.{part}_{'path' if part in paths_of(asked) else 'fraction'}"


def check_files_apart(trained: Mapping[str, Source], others: Mapping[str, Source]) -> None:
    """Refuse data of a part's own whose files are trained on.

    Args:
        trained: what is trained on, by the recipe's field that names it.
        others: data of their own that parts have.

    Raises:
        InputError: a file is in both, with what leaves it out of the training.
    """
    for part, other in others.items():
        held = {file.path.resolve() for file in other.files}
        for field, source in trained.items():
            both = [file.name for file in source.files if file.path.resolve() in held]
            streamed = source.hub and other.hub and source.hub.name == other.hub.name
            if streamed or (both and len(both) == len(source.files)):
                raise InputError(
                    f"holds all that {field} names, so it would be trained on; name other data, "
                    f"or leave it out and set data.{part}_fraction",
                    field=f"data.{part}_path",
                    value=other.title,
                )
            if both:
                one = len(both) == 1
                which = f"{both[0]!r} is" if one else f"{both[0]!r} and {len(both) - 1:,} more are"
                exclude = field.removesuffix("path") + "exclude"
                raise InputError(
                    f"{which} among the files of {field}, so {'it' if one else 'they'} would be "
                    f"trained on; name {'it' if one else 'them'} in {exclude}",
                    field=f"data.{part}_path",
                    value=other.title,
                )


def held_words(counts: Mapping[str, int], others: Mapping[str, str], what: str) -> str:
    """How much is held out, for people.

    Args:
        counts: of each part.
        others: what data of their own the parts have that have it.
        what: is counted.

    >>> held_words({"train": 8, "validation": 2, "test": 3}, {"test": "more.csv,"}, "texts")
    ', 2 of them for validation; test: more.csv, 3 texts'
    """
    drawn = [p for p in HELD if counts.get(p) and p not in others]
    words = [f", {counts[part]:,} of them for {part}" for part in drawn[:1]]
    words += [f", {counts[part]:,} for {part}" for part in drawn[1:]]
    words += [f"; {part}: {said} {counts.get(part, 0):,} {what}" for part, said in others.items()]
    return "".join(words)
