"""The rows of a stream, or of several that are mixed by weight, as a trainer takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from modicum.core.errors import InputError
from modicum.core.random import bits
from modicum.data.batch import IGNORED, Batch
from modicum.data.mixed_order import quotas, turns
from modicum.data.mixed_rows import summed
from modicum.data.row_stream import RowStream
from modicum.data.sampler import Sampler
from modicum.data.stream_block import RowBlock
from modicum.data.text_rows import StoreRows, TextRows

# In so many rows each source has its share, to the row.
CYCLE = 1024


class StreamedRows(TextRows):
    """Rows that are made when they are asked for, and are in memory for a step or so.

    Args:
        streams: of each source.
        weights: of each, above 0; its part of their sum is its share of the rows.

    Raises:
        InputError: several have no weights, or a weight is so small that a source gives no row.
    """

    def __init__(
        self, streams: Sequence[RowStream], weights: Sequence[float] | None = None
    ) -> None:
        placing = streams[0].shape.placing
        super().__init__(placing.sequence_length, placing.boundaries)
        self.streams = tuple(streams)
        self.counts = summed([each.counts for each in streams])
        self._shares = _shares(len(streams), weights)
        self._seed = placing.seed or 0
        self._turns = lru_cache(maxsize=4)(self._drawn_turns)

    def __len__(self) -> int:
        raise InputError(
            "how many rows a stream has is not known before all of it was read; set "
            "data.streaming to false",
            field="data.streaming",
            value=True,
        )

    @property
    def parts(self) -> tuple[StoreRows, ...]:
        """None: what is streamed is in no store."""
        return ()

    def reach(self, first: int, stop: int) -> None:
        """Have the rows [first, stop) in memory, on all ranks; those before are forgotten.

        Raises:
            InputError: as `RowStream.reach`.
        """
        for stream, begin, end in zip(
            self.streams, self._taken(first), self._taken(stop), strict=True
        ):
            if end > begin:
                stream.reach(begin, end)
        self.counts = summed([each.counts for each in self.streams])

    def count(self, index: int) -> int:
        """Trained tokens of one row."""
        rows, place = self._where(index)
        return rows.count(place)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The rows `indices`, which `reach` has brought: [len(indices), sequence_length]."""
        shape = (len(indices), self.sequence_length)
        inputs, labels = torch.empty(2, *shape, dtype=torch.int64)
        documents, several = torch.zeros(shape, dtype=torch.int32), False
        groups: dict[int, tuple[StoreRows, list[int], list[int]]] = {}
        for at, index in enumerate(indices):
            rows, place = self._where(index)
            _, targets, places = groups.setdefault(id(rows), (rows, [], []))
            targets.append(at)
            places.append(place)
        for rows, targets, places in groups.values():
            found = rows.batch(places)
            inputs[targets], labels[targets] = found.input_ids, found.labels
            if found.documents is not None:
                documents[targets], several = found.documents, True
        return Batch(inputs, labels, documents if several else None)

    def width(self, index: int) -> int:
        """How many inputs of a row hold a token."""
        rows, place = self._where(index)
        return rows.width(place)

    def row_of_several(self) -> int | None:
        """None: rows are not looked through before they come."""
        return None

    def worst(self, rows: int) -> Batch:
        """Rows of two documents each: as large as any, and made up, since none is read yet.

        Raises:
            ValueError: no rows are asked for.
        """
        if rows < 1:
            raise ValueError(f"a batch of {rows} rows")
        length, vocabulary = self.sequence_length, self.streams[0].shape.tokenizer.vocabulary_size
        ids = torch.arange(rows * (length + 1)).view(rows, -1) % vocabulary
        documents = (torch.arange(length) >= length // 2).to(torch.int32).repeat(rows, 1)
        labels = ids[:, 1:].clone()
        labels[:, -1] = IGNORED
        return Batch(ids[:, :-1].contiguous(), labels, documents if self.boundaries else None)

    def epoch_of(self, row: int) -> int:
        """How often all sources were gone through before a row."""
        taken = zip(self.streams, self._taken(row), strict=True)
        return min(stream.epoch_of(place) for stream, place in taken)

    def _where(self, index: int) -> tuple[StoreRows, int]:
        """The rows of the block that a row is in, and its place among them."""
        source, number = self._turn(index)
        block: RowBlock = self.streams[source].block(number)
        assert block.rows is not None
        return block.rows, int(block.order[number - block.first])

    def _turn(self, index: int) -> tuple[int, int]:
        """The source that a row is from, and its number there."""
        if len(self.streams) == 1:
            return 0, index
        cycle, place = divmod(index, CYCLE)
        sources, before = self._turns(cycle)
        source = int(sources[place])
        return source, cycle * self._shares[source] + int(before[place])

    def _taken(self, index: int) -> list[int]:
        """Of each source, how many of its rows come before a row."""
        if len(self.streams) == 1:
            return [index]
        cycle, place = divmod(index, CYCLE)
        found = torch.bincount(self._turns(cycle)[0][:place].long(), minlength=len(self.streams))
        return [cycle * share + int(n) for share, n in zip(self._shares, found, strict=True)]

    def _drawn_turns(self, cycle: int) -> tuple[Tensor, Tensor]:
        words = bits(CYCLE, seed=self._seed, name="sources of a stream", step=cycle)
        return turns(self._shares, torch.argsort(words, stable=True))


class StreamSampler(Sampler):
    """The rows of a stream as they come: step s takes them from s * batch_size on.

    Args:
        stream: all ranks ask for its steps at the same times.
        batch_size: sequences a step, over all ranks.
    """

    def __init__(self, stream: StreamedRows, batch_size: int) -> None:
        self.stream, self.batch_size = stream, batch_size

    def indices(self, step: int) -> list[int]:
        """The rows of one step, which are in memory then; those of earlier steps may not be.

        Raises:
            InputError: as `RowStream.reach`.
        """
        first = step * self.batch_size
        self.stream.reach(first, first + self.batch_size)
        return list(range(first, first + self.batch_size))

    def epoch_of(self, step: int) -> int:
        """The epoch, counted from 0, of the first sequence of a step."""
        return self.stream.epoch_of(step * self.batch_size)

    def state(self) -> dict[str, Any]:
        """Where the blocks of the newest step are."""
        return {"streams": [stream.state() for stream in self.stream.streams]}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Find the rows again from where they were."""
        for stream, own in zip(self.stream.streams, state["streams"], strict=True):
            stream.resume(own)


def _shares(sources: int, weights: Sequence[float] | None) -> list[int]:
    """Rows of each source in a cycle."""
    if sources == 1:
        return [CYCLE]
    if weights is None:
        raise InputError(
            "how many rows a stream has is not known, so sources of a stream must have weights",
            field="data.sources.0.weight",
            allowed="a weight of each source",
        )
    try:
        return quotas([CYCLE, *[0] * (sources - 1)], weights)
    except InputError as error:
        problem = f"so small that none of {CYCLE} rows is from this source"
        raise InputError(problem, field=error.field, value=error.value) from None
