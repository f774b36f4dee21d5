"""What a run on labelled texts reads, for people: the tokens of its rows, and what is odd."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from modicum.data.text_classes import TextClassRows


@dataclass(frozen=True)
class ClassRowView:
    """A row as the model sees it, padding left out.

    Args:
        label: the number of its class.
    """

    tokens: tuple[int, ...]
    label: int


def class_rows(rows: TextClassRows | None) -> Iterator[ClassRowView]:
    """The rows of one side, in order; none where there is no such side."""
    for index in range(0 if rows is None else len(rows)):
        assert rows is not None
        batch = rows.batch([index])
        yield ClassRowView(tuple(batch.input_ids[0].tolist()), int(batch.labels[0]))


@dataclass(frozen=True)
class ClassFacts:
    """Facts about labelled rows, which are compared token by token.

    Args:
        shortest, median, longest: their tokens.
        duplicates: rows that are trained, and the same as an earlier one of their class.
        contradicting: texts that are trained, and have several classes.
        overlap: rows of the validation whose text is trained too.
    """

    shortest: int
    median: int
    longest: int
    duplicates: int
    contradicting: int
    overlap: int


def class_facts(sides: Mapping[str, list[ClassRowView]]) -> ClassFacts:
    """Facts about the rows of `train` and `validation`.

    >>> one, other = ClassRowView((1, 2), 0), ClassRowView((1, 2), 1)
    >>> class_facts({"train": [one, one, other], "validation": [other]})
    ClassFacts(shortest=2, median=2, longest=2, duplicates=1, contradicting=1, overlap=1)
    """
    classes: dict[tuple[int, ...], set[int]] = {}
    for row in sides["train"]:
        classes.setdefault(row.tokens, set()).add(row.label)
    lengths = [len(row.tokens) for rows in sides.values() for row in rows]
    return ClassFacts(
        min(lengths),
        int(statistics.median_low(lengths)),
        max(lengths),
        len(sides["train"]) - sum(map(len, classes.values())),
        sum(len(labels) > 1 for labels in classes.values()),
        sum(row.tokens in classes for row in sides["validation"]),
    )
