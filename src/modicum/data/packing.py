"""Continuous text: documents laid end to end and split into rows of equal length.

No label is lost there: a row's last label is the next row's first token. Every token that
should be trained is the target of exactly one position of one row. Examples, whose answers need
their prompts, are packed by `packed_examples`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from modicum.data.batch import IGNORED, Batch
from modicum.data.fitting import PackingCounts
from modicum.data.text_rows import StoreRows
from modicum.data.token_arrays import TokenArrays
from modicum.data.token_store import TokenStore

# How long to look for a row that holds several documents: so many rows, so many times.
_ROWS_AT_A_TIME, _LOOKS = 64, 64


class Packed(StoreRows):
    """The rows of a store's documents, one after the other.

    Args:
        store: where the tokens are; those of a store stay on disk, mapped into memory.
        sequence_length: T, inputs of a row.
        boundaries: whether documents are kept apart: attention does not cross them, and a
            document's end does not predict the next document's start.

    Rows in which nothing is trained, such as those that lie within a prompt, are left out. The
    last row is filled up with the last token, not trained, as a document of its own.

    Raises:
        InputError: nothing in the store is trained.
    """

    def __init__(
        self, store: TokenStore | TokenArrays, sequence_length: int, boundaries: bool = True
    ) -> None:
        super().__init__(store, sequence_length, boundaries)
        places, lengths, prompts, _ = self.arrays.index
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
        self.trained = trained[self._rows]
        rows = len(self._rows)
        if rows == 0:
            raise self._nothing_trained(
                "no document has a token after its prompt or its first token"
            )
        filled = min(rows * sequence_length, int(self._starts[-1]))
        self.counts = PackingCounts(
            self.arrays.documents,
            rows,
            rows * sequence_length,
            filled,
            self.total_trained_tokens,
        )

    def batch(self, indices: Sequence[int]) -> Batch:
        """The rows `indices`, as a batch of [len(indices), sequence_length]."""
        first = self._rows[torch.as_tensor(indices, dtype=torch.int64)] * self.sequence_length
        where = first[:, None] + torch.arange(self.sequence_length + 1)
        document = self._document(where)  # one past the last document where the data has ended
        past_end = where >= self._starts[-1]
        place = where.clamp(max=int(self._starts[-1]) - 1)
        owner = document.clamp(max=len(self._places) - 1)
        tokens = self.arrays.ids(self._places[owner] + place - self._starts[owner])
        trained = ((where >= self._first[owner]) & ~past_end)[:, 1:]
        labels = tokens[:, 1:].masked_fill(~trained, IGNORED)
        inside = document[:, :-1]
        told = ~past_end[:, :-1] | self.pads_apart
        several = ((inside != inside[:, :1]) & told).any()
        if not self.boundaries or not several:
            return Batch(tokens[:, :-1].contiguous(), labels)
        numbers = (inside - inside[:, :1]).to(torch.int32)
        return Batch(tokens[:, :-1].contiguous(), labels, numbers)

    def width(self, index: int) -> int:
        """How many inputs of a row hold a token."""
        left = int(self._starts[-1]) - int(self._rows[index]) * self.sequence_length
        return min(left, self.sequence_length)

    def row_of_several(self) -> int | None:
        """A row of several documents, if one is among the first that may be."""
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
