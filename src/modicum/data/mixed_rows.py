"""The rows of several sources as one list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from modicum.data.batch import Batch
from modicum.data.fitting import PackingCounts
from modicum.data.text_rows import StoreRows, TextRows


class MixedRows(TextRows):
    """Rows of several stores, each packed by itself, so that no row holds two sources.

    They are spread: any first part of the list has rows of all sources, by how many these have. So
    an evaluation on the first rows looks at all of them.

    Args:
        parts: the rows of each source, all of one length.
    """

    def __init__(self, parts: Sequence[StoreRows]) -> None:
        super().__init__(parts[0].sequence_length, parts[0].boundaries)
        self._parts = tuple(parts)
        sizes = torch.tensor([len(part) for part in parts])
        self._ends = sizes.cumsum(0)
        # Row j of n is due at (j + 1/2) / n of the list.
        due = torch.cat([(torch.arange(n, dtype=torch.float64) + 0.5) / n for n in sizes.tolist()])
        self._flat = torch.argsort(due, stable=True)
        places = torch.empty_like(self._flat)
        places[self._flat] = torch.arange(len(self._flat))
        self.places: list[Tensor] = list(places.split(sizes.tolist()))
        self.trained = torch.cat([part.trained for part in parts])[self._flat]
        self.counts = summed([part.counts for part in parts])

    @property
    def parts(self) -> tuple[StoreRows, ...]:
        """The rows of each source; `places` has their numbers in this list."""
        return self._parts

    def batch(self, indices: Sequence[int]) -> Batch:
        """The rows `indices`, as a batch of [len(indices), sequence_length]."""
        source, row = self._where(torch.as_tensor(indices, dtype=torch.int64))
        shape = (len(source), self.sequence_length)
        inputs, labels = torch.empty(2, *shape, dtype=torch.int64)
        documents, several = torch.zeros(shape, dtype=torch.int32), False
        for number in source.unique().tolist():
            mine = source == number
            found = self._parts[number].batch(row[mine].tolist())
            inputs[mine], labels[mine] = found.input_ids, found.labels
            if found.documents is not None:
                documents[mine], several = found.documents, True
        return Batch(inputs, labels, documents if several else None)

    def width(self, index: int) -> int:
        """How many inputs of a row hold a token."""
        source, row = self._where(torch.tensor(index))
        return self._parts[int(source)].width(int(row))

    def row_of_several(self) -> int | None:
        """A row that holds several documents, of the first source that has one."""
        for part, places in zip(self._parts, self.places, strict=True):
            row = part.row_of_several()
            if row is not None:
                return int(places[row])
        return None

    def _where(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Source and row there of each row of the list."""
        flat = self._flat[indices]
        source = torch.searchsorted(self._ends, flat, right=True)
        return source, flat - torch.cat([self._ends.new_zeros(1), self._ends])[source]


def summed(counts: Sequence[PackingCounts]) -> PackingCounts:
    """What packing made of several sources together."""
    columns = zip(*(vars(each).values() for each in counts), strict=True)
    return PackingCounts(*map(sum, columns))


def source_shares(
    names: Sequence[str], counts: Sequence[PackingCounts], quotas: Sequence[int]
) -> list[Mapping[str, Any]]:
    """What each source gives to an epoch, as run.json and plan.jsonl have it (JSON).

    `share` is its part of an epoch's rows, `passes` how often its rows are gone through in one.
    """
    return [
        {
            "name": name,
            **each.as_json(),
            "share": round(quota / sum(quotas), 6),
            "passes": round(quota / max(each.rows, 1), 4),
        }
        for name, each, quota in zip(names, counts, quotas, strict=True)
    ]
