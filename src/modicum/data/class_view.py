"""What a run on labelled texts reads, for people: the tokens of its rows, and what is odd."""

from __future__ import annotations

import hashlib
import statistics
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from modicum.data.parts import TEST, TRAIN, VALIDATION
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


def row_digests(rows: TextClassRows) -> Iterator[bytes]:
    """One of each row's tokens, in order."""
    for row in class_rows(rows):
        yield hashlib.blake2b(array("q", row.tokens).tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class ClassFacts:
    """Facts about labelled rows, which are compared token by token.

    Args:
        shortest, median, longest: their tokens.
        duplicates: rows that are trained, and the same as an earlier one of their class.
        contradicting: texts that are trained, and have several classes.
        overlap: rows of the validation whose text is trained too.
        test_overlap: rows of the test whose text is trained or evaluated on too.
    """

    shortest: int
    median: int
    longest: int
    duplicates: int
    contradicting: int
    overlap: int
    test_overlap: int


def class_facts(sides: Mapping[str, list[ClassRowView]]) -> ClassFacts:
    """Facts about the rows of each part, by its name in `PARTS`.

    >>> one, other = ClassRowView((1, 2), 0), ClassRowView((1, 2), 1)
    >>> facts = class_facts({"train": [one, one, other], "validation": [other], "test": []})
    >>> facts.duplicates, facts.contradicting, facts.overlap, facts.test_overlap
    (1, 1, 1, 0)
    """
    classes: dict[tuple[int, ...], set[int]] = {}
    for row in sides[TRAIN]:
        classes.setdefault(row.tokens, set()).add(row.label)
    seen = {*classes, *(row.tokens for row in sides[VALIDATION])}
    lengths = [len(row.tokens) for rows in sides.values() for row in rows]
    return ClassFacts(
        min(lengths),
        int(statistics.median_low(lengths)),
        max(lengths),
        len(sides[TRAIN]) - sum(map(len, classes.values())),
        sum(len(labels) > 1 for labels in classes.values()),
        sum(row.tokens in classes for row in sides[VALIDATION]),
        sum(row.tokens in seen for row in sides[TEST]),
    )
