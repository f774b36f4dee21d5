"""Examples packed into rows, each in one piece: its prompt is there wherever its answer is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from modicum.core.random import bits
from modicum.data.batch import IGNORED, Batch
from modicum.data.fitting import LOOK_AHEAD, Example, Fitting, PackingCounts, TooLong
from modicum.data.store import TokenStore
from modicum.data.text_rows import TextRows, indexed, mapped


class PackedExamples(TextRows):
    """Rows of examples that stand together by first-fit decreasing; the end of a row is padding.

    Args:
        store: where the tokens are, and which of them are trained.
        sequence_length: T, inputs of a row.
        boundaries: whether attention keeps examples apart.
        too_long: what becomes of an example that is longer than a row, as `Fitting` has it.
        seed: of the order in which examples are taken; the rows are a function of it.

    Raises:
        InputError: nothing in the store is trained.
    """

    def __init__(
        self,
        store: TokenStore,
        sequence_length: int,
        boundaries: bool = True,
        *,
        too_long: TooLong = "truncate",
        seed: int = 0,
    ) -> None:
        super().__init__(store, sequence_length, boundaries)
        self._flags = mapped(store.trained_file, 1)
        index = indexed(store)
        fitting = Fitting(sequence_length, boundaries, too_long, store.begin)
        fitting.fit(_shuffled(index, seed))
        pieces = torch.tensor(fitting.table, dtype=torch.int64).view(-1, 5)
        numbers, start, self._widths, self._heads, self._skips = pieces.t().contiguous()
        self._starts = index[0, numbers] + start
        self._stops = index[0, numbers] + index[1, numbers]
        ends = torch.tensor(fitting.ends, dtype=torch.int64)
        spans = torch.stack([ends[:-1], ends[1:]], 1)
        trained = _sums(self._trained_in(numbers, start, index), spans)
        self._spans, self.trained = spans[trained > 0], trained[trained > 0]
        rows = len(self.trained)
        self.counts = PackingCounts(
            store.documents,
            rows,
            rows * sequence_length,
            int(_sums(self._widths, self._spans).sum()),
            self.total_trained_tokens,
            fitting.truncated,
            fitting.split,
            fitting.dropped,
        )
        if rows == 0:
            raise self._nothing_trained(
                "no example has a token to learn that fits into a row of "
                f"{sequence_length} after its prompt; see data.sequence_length and data.too_long"
            )

    def batch(self, indices: Sequence[int]) -> Batch:
        """The rows `indices`, as a batch of [len(indices), sequence_length]."""
        chosen = self._spans[torch.as_tensor(indices, dtype=torch.int64)]
        each = chosen[:, 1] - chosen[:, 0]
        row = torch.arange(len(each)).repeat_interleave(each)
        number = torch.arange(len(row)) - (each.cumsum(0) - each)[row]
        piece = chosen[row, 0] + number
        widths = self._widths[piece]
        before = widths.cumsum(0) - widths  # inputs of this batch before the piece
        owner = torch.arange(len(piece)).repeat_interleave(widths)
        inside = torch.arange(len(owner)) - before[owner]
        # A row's first piece begins at the row's begin, whatever the rows before it hold.
        column = torch.arange(len(owner)) - before[each.cumsum(0) - each][row][owner]
        at = row[owner] * self.sequence_length + column
        shape = (len(each), self.sequence_length)
        inputs = torch.zeros(shape, dtype=torch.int64)
        labels = torch.full(shape, IGNORED)
        documents = each[:, None].to(torch.int32).repeat(1, self.sequence_length)
        source, target = self._places(piece[owner], inside), self._places(piece[owner], inside + 1)
        stops = self._stops[piece[owner]]
        trained = (target < stops) & self._flags[target.clamp(max=len(self._flags) - 1)].bool()
        inputs.view(-1)[at] = self._ids(source)
        labels.view(-1)[at[trained]] = self._ids(target[trained])
        documents.view(-1)[at] = number[owner].to(torch.int32)
        if not self.boundaries or int(each.max()) == 1:
            return Batch(inputs, labels)
        return Batch(inputs, labels, documents)

    def width(self, index: int) -> int:
        """How many inputs of a row hold a token."""
        first, last = self._spans[index].tolist()
        return int(self._widths[first:last].sum())

    def row_of_several(self) -> int | None:
        """The first row that holds several examples."""
        found = (self._spans[:, 1] - self._spans[:, 0] > 1).nonzero()
        return int(found[0]) if len(found) else None

    def _places(self, piece: Tensor, inside: Tensor) -> Tensor:
        """Where in the tokens file the tokens of pieces are that stand at `inside` them."""
        skipped = self._skips[piece] * (inside >= self._heads[piece])
        return self._starts[piece] + inside + skipped

    def _trained_in(self, numbers: Tensor, start: Tensor, index: Tensor) -> Tensor:
        """The trained labels of each piece; only those of examples that are split are counted."""
        trained = index[3, numbers]
        width = index[1, numbers] - int(self.boundaries)
        for place in ((start > 0) | (width > self._widths + self._skips)).nonzero().flatten():
            first = int(self._starts[place]) + 1
            last = min(first + int(self._widths[place]), int(self._stops[place]))
            trained[place] = self._flags[first:last].sum()
        return trained


def _shuffled(index: Tensor, seed: int) -> Iterator[tuple[int, Example]]:
    """All examples with their numbers, in the seed's order."""
    words = bits(index.shape[1], seed=seed, name="packing order")
    for some in torch.argsort(words, stable=True).split(LOOK_AHEAD):
        for number, row in zip(some.tolist(), index[1:, some].t().tolist(), strict=True):
            yield number, Example(*row)


def _sums(values: Tensor, spans: Tensor) -> Tensor:
    """The sums of `values` over spans [rows, 2] of it."""
    before = torch.cat([torch.zeros(1, dtype=torch.int64), values.cumsum(0)])
    return before[spans[:, 1]] - before[spans[:, 0]]
