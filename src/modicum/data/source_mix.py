"""Several sources and their weights, which can be asked what one source can be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import PurePath

from modicum.data.readers import Document
from modicum.data.row_formats import RowFormat
from modicum.data.sources import Source


@dataclass(frozen=True)
class SourceMix:
    """Sources in order, each tokenized and packed by itself.

    Args:
        parts: two or more.
        weights: of each, as `quotas` has them; None: each row once an epoch.
    """

    parts: tuple[Source, ...]
    weights: tuple[float, ...] | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes that reading everything takes."""
        return sum(part.total_bytes for part in self.parts)

    @property
    def continuous(self) -> bool:
        """Whether all sources are continuous text, not examples."""
        return all(part.continuous for part in self.parts)

    @property
    def names(self) -> list[str]:
        """What people call the sources: their files' names where these differ, else their paths."""
        short = [PurePath(part.title).name for part in self.parts]
        if len(set(short)) == len(short):
            return short
        return [part.title for part in self.parts]

    @property
    def rows(self) -> RowFormat:
        """How rows become documents: of the first source of conversations, else of the first."""
        formats = [part.rows for part in self.parts]
        return next((each for each in formats if each.conversations), formats[0])

    def documents(self) -> Iterator[Document]:
        """Every document that is not blank, source by source.

        Raises:
            InputError: as `Source.documents` says.
        """
        return chain.from_iterable(part.documents() for part in self.parts)

    def everything(self) -> Iterator[Document]:
        """Every document within the limits, the blank ones too.

        Raises:
            InputError: as `Source.everything` says.
        """
        return chain.from_iterable(part.everything() for part in self.parts)

    def describe(self) -> str:
        """What each source is, for people."""
        weights = [None] * len(self.parts) if self.weights is None else self.weights
        pairs = zip(self.parts, weights, strict=True)
        return "; ".join(
            part.describe() + ("" if weight is None else f", weight {weight:g}")
            for part, weight in pairs
        )
