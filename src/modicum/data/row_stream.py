"""Rows that are read, tokenized and packed as training asks for them: nothing of them is kept.

A stream is blocks, one after the other. A block is a function of the data, the recipe and its place
alone, so a run finds its rows again where its checkpoint says which block they are in, on any
number of ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from modicum.core.errors import InputError
from modicum.core.ranks.ranks import Ranks
from modicum.data.encoding import LeftOut
from modicum.data.fitting import PackingCounts
from modicum.data.mixed_rows import summed
from modicum.data.stream_block import BlockPart, BlockReader, BlockShape, RowBlock
from modicum.data.stream_reader import Place, StreamReader


class BrokenStream(InputError):
    """The data cannot be read on; what was trained so far is good, and worth a checkpoint."""


class RowStream:
    """The rows of one source, in one order without an end, of which a few blocks are in memory.

    All ranks call `reach` with the same numbers, at the same times.

    Args:
        reader: gives the documents.
        shape: how they become blocks.
        ranks: who share the work.
    """

    def __init__(self, reader: StreamReader, shape: BlockShape, ranks: Ranks) -> None:
        self.reader, self.shape, self.ranks = reader, shape, ranks
        self._blocks: deque[RowBlock] = deque()
        self._saved: list[Mapping[str, Any]] = []
        self._source: BlockReader | None = None
        self._ahead: Future[BlockPart] | None = None
        self._thread = ThreadPoolExecutor(1, "modicum-stream")
        # Before the first block: the row that it begins with, what its digest must be, if that is
        # known, and how many rows this epoch has had.
        self._first, self._rows_of_epoch = 0, 0
        self._expected: str | None = None
        self.counts, self.left_out = PackingCounts(0, 0, 0, 0, 0), LeftOut()

    def reach(self, first: int, stop: int) -> None:
        """Have the rows [first, stop) in memory; those before are forgotten.

        Raises:
            BrokenStream: the data cannot be read, with file and line; on all ranks.
            InputError: it is not what the checkpoint was made of.
        """
        while len(self._blocks) > 1 and self._blocks[0].stop <= first:
            self._blocks.popleft()
        if self._source is None:
            self._begin(first)
        while not self._blocks or self._blocks[-1].stop < stop:
            self._load(first)

    def block(self, row: int) -> RowBlock:
        """The block that a row is in, which `reach` has brought.

        Raises:
            LookupError: it is not in memory.
        """
        for block in self._blocks:
            if block.first <= row < block.stop:
                return block
        raise LookupError(f"row {row} of the stream is not in memory")

    def epoch_of(self, row: int) -> int:
        """The epoch of a row: of one that is in memory, or the first that is not."""
        for block in self._blocks:
            if row < block.stop:
                return block.start.epoch
        return self._blocks[-1].end.epoch if self._blocks else 0

    def state(self) -> list[dict[str, Any]]:
        """Where the blocks in memory are, and the next one (JSON)."""
        if not self._blocks:
            return [dict(each) for each in self._saved]
        last = self._blocks[-1]
        number = 0 if last.last else last.number + 1
        end = {"first": last.stop, "place": list(last.end), "number": number, "digest": None}
        return [*(block.state() for block in self._blocks), end]

    def resume(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Begin where a state says, at the block of the row that is asked for first."""
        self._saved = list(state)

    def _begin(self, first: int) -> None:
        """Open the data at the block of a row: where a state says, else at the beginning."""
        known = [each for each in self._saved if each["first"] <= first]
        self._source = BlockReader(self.reader, self.shape, self.ranks)
        self._first = first
        if known:
            self._rows_of_epoch = 1  # or more, in blocks that were read before
            found = max(known, key=lambda each: each["first"])
            self._source.place, self._source.number = Place(*found["place"]), found["number"]
            self._first, self._expected = found["first"], found["digest"]

    def _load(self, wanted: int) -> None:
        """One more block; the one after it is read meanwhile."""
        assert self._source is not None
        ahead = self._ahead or self._thread.submit(self._source.part)
        self._ahead = None
        part, error = None, None
        try:
            part = ahead.result()
        except InputError as found:
            error = found
        self._agree(error)
        assert part is not None
        block = RowBlock.of(part, self.shape, self._first, self.ranks)
        if self._expected is not None and block.digest != self._expected:
            raise InputError(
                "the data has changed since this run began; put it back as it was, or start a new "
                "run from this one's state: give --out a new folder and --fork this one",
                field="data.path",
            )
        self._expected, self._first = None, block.stop
        self._count(block)
        if block.stop <= wanted:
            self._blocks.clear()
        self._blocks.append(block)
        self._ahead = self._thread.submit(self._source.part)

    def _agree(self, error: InputError | None) -> None:
        """Raise what any rank met, on all of them."""
        said = self.ranks.gather(None if error is None else str(error))
        met = next((each for each in said if each is not None), None)
        if met is not None:
            raise BrokenStream(met) from error

    def _count(self, block: RowBlock) -> None:
        self._rows_of_epoch += len(block.order)
        if block.last and not self._rows_of_epoch:
            raise InputError(
                "nothing in the data is trained: no document has a token to learn that fits into "
                f"a row of {self.shape.placing.sequence_length}",
                file=self.reader.source.title,
            )
        if block.last:
            self._rows_of_epoch = 0
        self.left_out = LeftOut.summed([self.left_out, block.left_out])
        if block.rows is not None:
            self.counts = summed([self.counts, block.rows.counts])
