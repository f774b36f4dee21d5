"""What any data set is to a trainer: rows that make batches, and batches that know their count.

Packed text and images both satisfy these, so that shares of ranks, accumulation, rehearsals and
evaluation are written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Generic, Protocol, Self, TypeVar

import torch


class AnyBatch(Protocol):
    """A micro-batch: tensors of as many rows, and the count that belongs to the sum of losses."""

    @property
    def rows(self) -> int:
        """How many rows there are."""

    @property
    def count(self) -> int:
        """How many terms the sum of losses has; on an accelerator, asking may wait for it."""

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """The same batch on `device`."""

    def split(self, micro_batch_size: int) -> list[Self]:
        """Views of `micro_batch_size` rows each, in order; the last may have fewer."""

    def idle(self) -> Self:
        """The first row, in which nothing is trained: its sum is 0, its count 0."""

    def twice(self) -> Self:
        """The rows, and after them the same again: for two passes at once."""


B = TypeVar("B", bound=AnyBatch, covariant=True)


class Rows(Protocol[B]):
    """Rows that are made into a batch when they are asked for."""

    def __len__(self) -> int: ...

    def count(self, index: int) -> int:
        """What a row adds to the count of a batch, without making it."""

    def batch(self, indices: Sequence[int]) -> B:
        """The rows `indices`, in that order."""

    def worst(self, rows: int) -> B:
        """A batch of `rows` rows that takes as much memory as any.

        Raises:
            ValueError: no rows are asked for.
        """

    def shapes(self, rows: Iterable[int]) -> Sequence[B]:
        """Batches of every shape that those of so many rows can have, the worst first."""


class RowsOnDemand(Generic[B]):
    """Rows that are read when the first of them is asked for, since perhaps none ever is.

    Args:
        read: reads them.
    """

    def __init__(self, read: Callable[[], Rows[B]]) -> None:
        self._read = read

    @cached_property
    def rows(self) -> Rows[B]:
        """The rows themselves."""
        return self._read()

    def __len__(self) -> int:
        return len(self.rows)

    def count(self, index: int) -> int:
        """As the rows have it."""
        return self.rows.count(index)

    def batch(self, indices: Sequence[int]) -> B:
        """As the rows have it."""
        return self.rows.batch(indices)

    def worst(self, rows: int) -> B:
        """As the rows have it."""
        return self.rows.worst(rows)

    def shapes(self, rows: Iterable[int]) -> Sequence[B]:
        """As the rows have it."""
        return self.rows.shapes(rows)
