"""Which examples stand in which row: placed once, kept in files, mapped by who reads rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modicum.core.files import file_digest, publish_folder, regular, write_json
from modicum.core.random import bits
from modicum.data.fitting import LOOK_AHEAD, Example, Fitting, PackingCounts, TooLong
from modicum.data.token_arrays import TokenArrays, mapped
from modicum.data.token_store import MANIFEST, TokenStore

_FORMAT = 1
_TENSORS = ("pieces", "spans", "trained")


@dataclass(frozen=True)
class Placing:
    """What decides the rows of examples; the arguments of `PackedExamples`.

    `seed` decides in which order they are taken, None takes them as they stand; `part` is which
    part of the data they are, as parts have orders of their own.
    """

    sequence_length: int
    boundaries: bool = True
    too_long: TooLong = "truncate"
    seed: int | None = 0
    part: int = 0


@dataclass(frozen=True)
class ExampleTable:
    """Rows of pieces of examples.

    Args:
        pieces: int64 [5, pieces]: of each its first place in the tokens file, the end of its
            example there, its inputs, and `head` and `skip` of `Piece`.
        spans: int64 [rows, 2]: a row's first piece, and the one after its last.
        trained: int64 [rows]: labels of a row that are trained, at least one.
        counts: what packing made of the examples.
    """

    pieces: Tensor
    spans: Tensor
    trained: Tensor
    counts: PackingCounts

    @classmethod
    def of(cls, documents: TokenArrays, placing: Placing) -> ExampleTable:
        """The table of examples; a function of both."""
        index, flags = documents.index, documents.flags
        assert flags is not None
        length, boundaries = placing.sequence_length, placing.boundaries
        fitting = Fitting(length, boundaries, placing.too_long, documents.begin)
        fitting.fit(_ordered(index, placing))
        table = torch.tensor(fitting.table, dtype=torch.int64).view(-1, 5)
        numbers, start, widths, heads, skips = table.t().contiguous()
        starts, stops = index[0, numbers] + start, index[0, numbers] + index[1, numbers]
        trained = index[3, numbers]
        # The labels of examples that are split or truncated are counted one by one.
        parted = (start > 0) | (index[1, numbers] - int(boundaries) > widths + skips)
        for place in parted.nonzero().flatten():
            first = int(starts[place]) + 1
            trained[place] = flags[first : min(first + int(widths[place]), int(stops[place]))].sum()
        ends = torch.tensor(fitting.ends, dtype=torch.int64)
        spans = torch.stack([ends[:-1], ends[1:]], 1)
        labels = _sums(trained, spans)
        spans, labels = spans[labels > 0].contiguous(), labels[labels > 0]
        counts = PackingCounts(
            documents.documents,
            len(labels),
            len(labels) * length,
            int(_sums(widths, spans).sum()),
            int(labels.sum()),
            fitting.truncated,
            fitting.split,
            fitting.dropped,
        )
        return cls(torch.stack([starts, stops, widths, heads, skips]), spans, labels, counts)

    @classmethod
    def kept(cls, store: TokenStore, placing: Placing, *, check: bool = True) -> ExampleTable:
        """The same from the files next to the store's, which are made where they are not there.

        The files are mapped: a process holds what it has read of them.

        Args:
            check: False where another process has just done so: files are not read to compare
                their digests, and not made.

        Raises:
            OSError: without `check`, there are none.
        """
        folder = store.folder / f"rows-{store.side}"
        tokens = file_digest(store.folder / MANIFEST)
        made_from = {"format": _FORMAT, "tokens": tokens, **vars(placing)}
        if check and not _is_made_from(folder, made_from):
            table = cls.of(TokenArrays.of(store), placing)
            if not len(table.trained):
                return table
            table._write(folder, made_from)
        return cls._mapped(folder)

    @classmethod
    def _mapped(cls, folder: Path) -> ExampleTable:
        counts = json.loads((folder / MANIFEST).read_bytes())["counts"]
        pieces, spans, trained = (mapped(folder / f"{name}.bin", 8) for name in _TENSORS)
        return cls(pieces.view(5, -1), spans.view(-1, 2), trained, PackingCounts(**counts))

    def _write(self, folder: Path, made_from: dict[str, Any]) -> None:
        with publish_folder(folder) as temporary:
            files = {}
            for name in _TENSORS:
                path = temporary / f"{name}.bin"
                getattr(self, name).numpy().tofile(path)
                files[path.name] = file_digest(path)
            content = {"made_from": made_from, "counts": vars(self.counts), "files": files}
            write_json(temporary / MANIFEST, content)


def _is_made_from(folder: Path, made_from: dict[str, Any]) -> bool:
    """Whether the files are complete and were made from just this."""
    try:
        manifest = json.loads(regular(folder / MANIFEST).read_bytes())
        files = manifest["files"].items()
        return manifest["made_from"] == made_from and all(
            file_digest(folder / name) == digest for name, digest in files
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # absent, truncated or overwritten: to be made again


def _ordered(index: Tensor, placing: Placing) -> Iterator[tuple[int, Example]]:
    """All examples with their numbers, in the seed's order or as they stand."""
    count = index.shape[1]
    if placing.seed is None:
        order = torch.arange(count)
    else:
        words = bits(count, seed=placing.seed, name="packing order", step=placing.part)
        order = torch.argsort(words, stable=True)
    for some in order.split(LOOK_AHEAD):
        for number, row in zip(some.tolist(), index[1:, some].t().tolist(), strict=True):
            yield number, Example(*row)


def _sums(values: Tensor, spans: Tensor) -> Tensor:
    """The sums of `values` over spans [rows, 2] of it."""
    before = torch.cat([torch.zeros(1, dtype=torch.int64), values.cumsum(0)])
    return before[spans[:, 1]] - before[spans[:, 0]]
