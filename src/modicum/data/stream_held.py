"""The rows of a stream that are evaluated: as many as are looked at, in memory."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator

from modicum.core.ranks.ranks import Ranks
from modicum.data.readers import Document
from modicum.data.stream_block import BlockPart, BlockShape, RowBlock
from modicum.data.stream_reader import Place
from modicum.data.text_rows import StoreRows


def held_rows(
    documents: Iterable[Document], shape: BlockShape, rows: int | None, *, continuous: bool
) -> StoreRows | None:
    """The first documents, as many as fill the rows; None where nothing of them is trained.

    Each rank reads them for itself.

    Args:
        rows: as many as an evaluation looks at; None: all.
        continuous: whether they are running text.

    Raises:
        InputError: what is wrong with a document, with file and line.
    """
    writer = shape.writer(continuous)
    size = math.inf if rows is None else rows * shape.placing.sequence_length

    def first() -> Iterator[Document]:
        for document in documents:
            # Each document has a token, its last, that is no input.
            if writer.handle.tell() // writer.token_bytes - writer.documents >= size:
                return
            yield document

    for _ in writer.write(first()):
        pass
    numbers = array("q", range(writer.documents))
    part = BlockPart(Place(), Place(), 0, True, numbers, writer)
    return RowBlock.of(part, shape, 0, Ranks()).rows
