"""Documents laid end to end and split into rows of equal length.

No label is lost there: a row's last label is the next row's first token. Every token that
should be trained is the target of exactly one position of one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from modicum.core.errors import InputError
from modicum.data.batch import IGNORED, Batch
from modicum.data.store import TokenStore

# How long to look for a row that holds several documents: so many rows, so many times.
_ROWS_AT_A_TIME, _LOOKS = 64, 64


class Packed:
    """The rows of one side of a token store, made when they are asked for.

    Args:
        store: where the tokens are; they stay on disk, mapped into memory.
        sequence_length: T, inputs of a row.
        boundaries: whether documents are kept apart: attention does not cross them, and a
            document's end does not predict the next document's start.

    Rows in which nothing is trained, such as those that lie within a prompt, are left out. The
    last row is filled up with the last token, not trained, as a document of its own.

    Raises:
        InputError: nothing in the store is trained.
    """

    def __init__(self, store: TokenStore, sequence_length: int, boundaries: bool = True) -> None:
        self.store, self.sequence_length, self.boundaries = store, sequence_length, boundaries
        self._tokens = _mapped(store.tokens_file, store.token_bytes)
        places, lengths, prompts = _mapped(store.index_file, 8).view(-1, 3).unbind(1)
        self._places = places.contiguous()
        # In packed order document d has the tokens [starts[d], starts[d + 1]), and those from
        # first[d] on are targets: not the prompt, nor a token that nothing before it may predict.
        self._starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        self._first = self._starts[:-1] + prompts.clamp(min=int(boundaries))
        targets = self._starts[1:] - self._first
        self._targets_before = torch.cat([torch.zeros(1, dtype=torch.int64), targets.cumsum(0)])
        count = -(-int(self._starts[-1]) // sequence_length)
        edges = torch.arange(count + 1) * sequence_length + 1
        trained = self._count_before(edges).diff()
        self._rows = trained.nonzero().squeeze(1)
        self._trained = trained[self._rows]
        if len(self._rows) == 0:
            raise InputError(
                "nothing in the data is trained: no document has a token after its prompt or its "
                "first token",
                file=store.folder,
            )

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def total_trained_tokens(self) -> int:
        """Trained tokens of all rows together."""
        return int(self._trained.sum())

    def count(self, index: int) -> int:
        """Trained tokens of one row."""
        return int(self._trained[index])

    def batch(self, indices: Sequence[int]) -> Batch:
        """The rows `indices`, as a batch of [len(indices), sequence_length]."""
        first = self._rows[torch.as_tensor(indices, dtype=torch.int64)] * self.sequence_length
        where = first[:, None] + torch.arange(self.sequence_length + 1)
        document = self._document(where)  # one past the last document where the data has ended
        past_end = where >= self._starts[-1]
        place = where.clamp(max=int(self._starts[-1]) - 1)
        owner = document.clamp(max=len(self._places) - 1)
        tokens = self._tokens[self._places[owner] + place - self._starts[owner]].long()
        if self.store.token_bytes == 2:
            tokens &= 0xFFFF  # torch has few operations on unsigned integers, so the file is int16
        trained = ((where >= self._first[owner]) & ~past_end)[:, 1:]
        labels = tokens[:, 1:].masked_fill(~trained, IGNORED)
        inside = document[:, :-1]
        several = ((inside != inside[:, :1]) & ~past_end[:, :-1]).any()
        if not self.boundaries or not several:
            return Batch(tokens[:, :-1].contiguous(), labels)
        numbers = (inside - inside[:, :1]).to(torch.int32)
        return Batch(tokens[:, :-1].contiguous(), labels, numbers)

    def worst(self, rows: int) -> Batch:
        """A batch of `rows` rows that takes as much memory as any: with documents if any has.

        Raises:
            ValueError: no rows are asked for.
        """
        if rows < 1:
            raise ValueError(f"a batch of {rows} rows")
        row = self._row_of_several_documents() if self.boundaries else None
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

    def _row_of_several_documents(self) -> int | None:
        # A document's first token is not trained, so a row in which all are trained is one
        # document.
        candidates = (row for row in range(len(self)) if self.count(row) < self.sequence_length)
        for _ in range(_LOOKS):
            some = list(islice(candidates, _ROWS_AT_A_TIME))
            if not some:
                break
            documents = self.batch(some).documents
            if documents is not None:
                return some[int((documents != documents[:, :1]).any(1).nonzero()[0])]
        return None

    def _document(self, where: Tensor) -> Tensor:
        return torch.searchsorted(self._starts, where, right=True) - 1

    def _count_before(self, where: Tensor) -> Tensor:
        """How many targets lie before the packed places `where`."""
        document = self._document(where).clamp(max=len(self._first) - 1)
        within = (where - self._first[document]).clamp(min=0)
        whole = self._targets_before[document + 1] - self._targets_before[document]
        return self._targets_before[document] + torch.minimum(within, whole)


def _mapped(path: Path, width: int) -> Tensor:
    """The integers of a file, [bytes / width], signed, mapped and not read."""
    dtype = {2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    size = path.stat().st_size // width
    return torch.from_file(str(path), shared=False, size=size, dtype=dtype)
