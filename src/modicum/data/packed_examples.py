"""Examples packed into rows, each in one piece: its prompt is there wherever its answer is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from modicum.data.batch import IGNORED, Batch
from modicum.data.example_table import ExampleTable, Placing
from modicum.data.fitting import TooLong
from modicum.data.text_rows import StoreRows
from modicum.data.token_arrays import TokenArrays
from modicum.data.token_store import TokenStore


class PackedExamples(StoreRows):
    """Rows of examples that stand together by first-fit decreasing; the end of a row is padding.

    Args:
        store: where the tokens are, and which of them are trained.
        sequence_length: T, inputs of a row.
        boundaries: whether attention keeps examples apart.
        too_long: what becomes of an example that is longer than a row, as `Fitting` has it.
        seed: of the order in which examples are taken; the rows are a function of it.
        table: of the same store and settings, where it was made before.

    Raises:
        InputError: nothing in the store is trained.
    """

    def __init__(
        self,
        store: TokenStore | TokenArrays,
        sequence_length: int,
        boundaries: bool = True,
        *,
        too_long: TooLong = "truncate",
        seed: int = 0,
        table: ExampleTable | None = None,
    ) -> None:
        super().__init__(store, sequence_length, boundaries)
        assert self.arrays.flags is not None
        self._flags = self.arrays.flags
        if table is None:
            placing = Placing(sequence_length, boundaries, too_long, seed)
            table = ExampleTable.of(self.arrays, placing)
        self._starts, self._stops, self._widths, self._heads, self._skips = table.pieces
        self._spans, self.trained, self.counts = table.spans, table.trained, table.counts
        if not len(self.trained):
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
        inputs.view(-1)[at] = self.arrays.ids(source)
        labels.view(-1)[at[trained]] = self.arrays.ids(target[trained])
        documents.view(-1)[at] = number[owner].to(torch.int32)
        padded = self.pads_apart and len(owner) < inputs.numel()
        if not self.boundaries or (int(each.max()) == 1 and not padded):
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
