"""Blocks of a stream: so many documents, read, tokenized and packed into rows in memory.

Every rank reads all documents of a block, and tokenizes every n-th of them, where n is the number
of ranks; then the ranks exchange tokens. So a block is the same whatever the ranks, and each
document is tokenized once.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from modicum.core.random import bits
from modicum.core.ranks.ranks import Ranks
from modicum.data.document_writer import DocumentWriter
from modicum.data.encoding import LeftOut
from modicum.data.example_table import ExampleTable, Placing
from modicum.data.fitting import row_room
from modicum.data.packed_examples import PackedExamples
from modicum.data.packing import Packed
from modicum.data.parts import TRAIN
from modicum.data.readers import Document, Unmade
from modicum.data.stream_reader import Place, StreamReader
from modicum.data.text_rows import NothingTrained, StoreRows
from modicum.data.token_arrays import TokenArrays
from modicum.data.tokenizer import Tokenizer

# A block of long documents has fewer of them: so much text bounds its memory.
BLOCK_BYTES = 1 << 25


@dataclass(frozen=True)
class BlockShape:
    """How documents become the rows of blocks.

    Args:
        placing: how rows are packed; its seed is that of all orders.
        tokenizer: makes tokens of text.
        model_vocabulary: ids must lie below it.
        documents: of a block, at most.
        shuffle: whether documents and rows of a block are shuffled.
        pads_apart: as `StoreRows` has it.
    """

    placing: Placing
    tokenizer: Tokenizer
    model_vocabulary: int
    documents: int
    shuffle: bool
    pads_apart: bool = False

    def writer(self, continuous: bool) -> DocumentWriter:
        """What tokenizes documents into memory."""
        placing = self.placing
        room = row_room(placing.sequence_length, placing.boundaries)
        return DocumentWriter(
            BytesIO(),
            None if continuous else BytesIO(),
            self.tokenizer,
            self.model_vocabulary,
            room if placing.too_long == "truncate" else None,
            room if placing.too_long == "refuse" and not continuous else None,
        )


@dataclass
class BlockPart:
    """What one rank tokenized of a block.

    Args:
        start, end: where the block begins, and the block after it.
        number: of the block in its epoch.
        last: whether it is the last of its epoch.
        numbers: of the rank's documents in the block.
    """

    start: Place
    end: Place
    number: int
    last: bool
    numbers: array[int]
    writer: DocumentWriter


@dataclass
class BlockReader:
    """Reads this rank's parts of a stream's blocks, one after the other.

    Args:
        reader: gives the documents.
        shape: how many a block has, and what tokenizes them.
        ranks: this rank tokenizes its share of each block.
        place, number: where the next block begins, and its number in the epoch.
    """

    reader: StreamReader
    shape: BlockShape
    ranks: Ranks
    place: Place = field(default_factory=Place)
    number: int = 0
    _documents: Iterator[tuple[Place, Unmade]] | None = None
    _next: tuple[Place, Unmade] | None = None

    def part(self) -> BlockPart:
        """The next block, as far as this rank tokenizes it.

        Raises:
            InputError: what is wrong with a document, with file and line.
        """
        if self._documents is None:
            self._documents = self.reader.trained(self.place)
            self._next = next(self._documents, None)
        start, number = self.place, self.number
        writer, numbers = self.shape.writer(self.reader.source.continuous), array("q")
        for _ in writer.write(self._own(numbers)):
            pass
        last = self._next is None
        if last:
            self.place, self.number, self._documents = Place(start.epoch + 1), 0, None
        else:
            self.number += 1
        return BlockPart(start, self.place, number, last, numbers, writer)

    def _own(self, numbers: array[int]) -> Iterator[Document]:
        """This rank's documents of a block, all others passed by; notes which they are."""
        size, number = 0, 0
        assert self._documents is not None
        while self._next is not None and number < self.shape.documents and size < BLOCK_BYTES:
            after, unmade = self._next
            if number % self.ranks.size == self.ranks.rank:
                document = unmade.make()
                if not document.blank:
                    numbers.append(number)
                yield document
            number, size = number + 1, size + unmade.size
            self.place = after
            if number == self.shape.documents or size >= BLOCK_BYTES:
                self.place = Place(*after[:4], unmade.state())
            self._next = next(self._documents, None)


@dataclass(frozen=True)
class RowBlock:
    """Some rows of a stream.

    Args:
        first: the number in the stream of its first row.
        rows: as they were packed; None where nothing of it is trained.
        order: the packed row at each place: int64 [rows].
        start, end, number, last: as `BlockPart` has them.
        left_out: what is not among the tokens.
        arrays: the tokens.
    """

    first: int
    rows: StoreRows | None
    order: Tensor
    start: Place
    end: Place
    number: int
    last: bool
    left_out: LeftOut
    arrays: TokenArrays

    @classmethod
    def of(cls, part: BlockPart, shape: BlockShape, first: int, ranks: Ranks) -> RowBlock:
        """The block of all ranks' parts; they call this together."""
        arrays = _gathered(part, shape, ranks)
        rows = _packed(arrays, shape, part.number)
        count = 0 if rows is None else len(rows)
        order = torch.arange(count)
        if shape.shuffle:
            seed, epoch = shape.placing.seed, part.start.epoch
            assert seed is not None
            # Of the first block as `Sampler` has it: data that is one block trains as if mapped.
            name = f"data order, block {part.number}" if part.number else "data order"
            order = torch.argsort(bits(count, seed=seed, name=name, step=epoch), stable=True)
        examples = {TRAIN: arrays.flags is not None}
        own = part.writer.left_out(bytearray(part.writer.documents), examples)[TRAIN]
        left = [LeftOut(**each) for each in ranks.gather(vars(own))]
        place = (part.start, part.end, part.number, part.last)
        return cls(first, rows, order, *place, LeftOut.summed(left), arrays)

    @property
    def stop(self) -> int:
        """The number of the first row of the next block."""
        return self.first + len(self.order)

    @cached_property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of its tokens: whether a run that resumes finds them again."""
        found = hashlib.sha256(self.arrays.index[1].numpy().tobytes())
        found.update(self.arrays.tokens.numpy().tobytes())
        return found.hexdigest()

    def state(self) -> dict[str, Any]:
        """Where it is, as JSON."""
        return {
            "first": self.first,
            "place": list(self.start),
            "number": self.number,
            "digest": self.digest,
        }


def _gathered(part: BlockPart, shape: BlockShape, ranks: Ranks) -> TokenArrays:
    """The documents of all ranks in the order of the stream."""
    writer = part.writer
    columns = (part.numbers, writer.lengths, writer.prompts, writer.trained)
    own = torch.tensor([list(column) for column in columns], dtype=torch.int64)
    found = [each.view(4, -1) for each in ranks.gather_tensor(own.view(-1))]
    table = torch.cat(found, 1)
    tokens = torch.cat(ranks.gather_tensor(_tensor(writer.handle, writer.token_bytes)))
    flags = None
    if writer.flags is not None:
        flags = torch.cat(ranks.gather_tensor(_tensor(writer.flags, 1)))
    order = torch.argsort(table[0])
    lengths = table[1]
    starts = lengths.cumsum(0) - lengths
    lengths, starts = lengths[order], starts[order]
    first = lengths.cumsum(0) - lengths
    places = torch.arange(len(tokens)) + (starts - first).repeat_interleave(lengths)
    index = torch.stack([first, lengths, table[2, order], table[3, order]])
    begin = len(shape.tokenizer.begin_ids)
    return TokenArrays(tokens[places], index, None if flags is None else flags[places], begin)


def _tensor(handle: Any, width: int) -> Tensor:
    content = handle.getbuffer()
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[width]
    return torch.frombuffer(content, dtype=dtype) if len(content) else torch.empty(0, dtype=dtype)


def _packed(arrays: TokenArrays, shape: BlockShape, number: int) -> StoreRows | None:
    placing = shape.placing
    length, boundaries = placing.sequence_length, placing.boundaries
    if not arrays.documents:
        return None
    try:
        if arrays.flags is None:
            rows: StoreRows = Packed(arrays, length, boundaries)
        else:
            seed = placing.seed if shape.shuffle else None
            own = Placing(length, boundaries, placing.too_long, seed, number)
            table = ExampleTable.of(arrays, own)
            rows = PackedExamples(arrays, length, boundaries, table=table)
    except NothingTrained:
        return None
    rows.pads_apart = shape.pads_apart
    return rows
