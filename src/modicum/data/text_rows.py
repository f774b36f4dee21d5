"""Rows of text: what packing documents and packing examples have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from modicum.core.errors import InputError
from modicum.data.batch import Batch
from modicum.data.fitting import PackingCounts
from modicum.data.token_arrays import TokenArrays
from modicum.data.token_store import TokenStore


class TextRows(ABC):
    """Rows of tokens, made when they are asked for.

    Args:
        sequence_length: T, inputs of a row.
        boundaries: whether documents are kept apart: attention does not cross them.

    Attributes:
        trained: of each row, how many of its labels are trained: int64 [rows].
        counts: what packing made of the documents.
    """

    trained: Tensor
    counts: PackingCounts

    def __init__(self, sequence_length: int, boundaries: bool = True) -> None:
        self.sequence_length, self.boundaries = sequence_length, boundaries

    def __len__(self) -> int:
        return len(self.trained)

    @property
    def total_trained_tokens(self) -> int:
        """Trained tokens of all rows together."""
        return int(self.trained.sum())

    def count(self, index: int) -> int:
        """Trained tokens of one row."""
        return int(self.trained[index])

    @property
    @abstractmethod
    def parts(self) -> tuple[StoreRows, ...]:
        """The rows of each store."""

    @abstractmethod
    def batch(self, indices: Sequence[int]) -> Batch:
        """The rows `indices`, as a batch of [len(indices), sequence_length]."""

    @abstractmethod
    def width(self, index: int) -> int:
        """How many inputs of a row hold a token; what follows is padding."""

    @abstractmethod
    def row_of_several(self) -> int | None:
        """A row that holds several documents which attention keeps apart, if one is found."""

    def worst(self, rows: int) -> Batch:
        """A batch of `rows` rows that takes as much memory as any: with documents if any has.

        Raises:
            ValueError: no rows are asked for.
        """
        if rows < 1:
            raise ValueError(f"a batch of {rows} rows")
        row = self.row_of_several() if self.boundaries else None
        if row is not None:
            return self.batch([row] * rows)
        # The first rows: the last of all may hold padding, and repeated it would be all there is.
        return self.batch([index % len(self) for index in range(rows)])

    def shapes(self, rows: Iterable[int]) -> list[Batch]:
        """Batches of every shape that those of so many rows can have, the worst first."""
        sizes = sorted(set(rows), reverse=True)
        worst, found = self.worst(sizes[0]), []
        for size in sizes:
            part = worst.split(size)[0]
            found.append(part)
            if part.documents is not None:
                found.append(replace(part, documents=None))
        return found


class StoreRows(TextRows):
    """The rows of one side of a token store, or of documents in memory.

    Args:
        documents: where the tokens are; those of a store stay on disk, mapped into memory.
        sequence_length, boundaries: as `TextRows` has them.

    Attributes:
        pads_apart: whether a batch says of padding, too, that it belongs to no document before it.
            Causal attention needs to know of it where positions depend on how long a document is.
    """

    pads_apart: bool = False

    def __init__(
        self, documents: TokenStore | TokenArrays, sequence_length: int, boundaries: bool = True
    ) -> None:
        super().__init__(sequence_length, boundaries)
        self._store = documents if isinstance(documents, TokenStore) else None
        self.arrays = arrays_of(documents)

    @property
    def store(self) -> TokenStore:
        """The store; there is none where documents are in memory."""
        assert self._store is not None
        return self._store

    @property
    def parts(self) -> tuple[StoreRows, ...]:
        """Itself."""
        return (self,)

    def _nothing_trained(self, why: str) -> NothingTrained:
        folder = None if self._store is None else self._store.folder
        return NothingTrained(f"nothing in the data is trained: {why}", file=folder)


class NothingTrained(InputError):
    """Documents that have no token to learn."""


def arrays_of(documents: TokenStore | TokenArrays) -> TokenArrays:
    """Documents as tensors, wherever they are."""
    return documents if isinstance(documents, TokenArrays) else TokenArrays.of(documents)
