"""Rows of one text each with its class: padded batches of tokens, and how they are kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modicum.core.files import publish_folder, write_json
from modicum.data.batch import LabelledRows

WEIGHTS, COUNTS = "tokens.safetensors", "counts.json"


@dataclass(frozen=True)
class TextClassBatch(LabelledRows):
    """Rows of tokens, each with one label, padded at the end to the longest of them.

    Args:
        input_ids: int64 [B, T].
        labels: int64 [B], or -100 where none is trained.
        mask: int64 [B, T], 1 where there is a token; None: the model needs none.
        types: int64 [B, T], of which text of a pair each token is; None: the model does not ask.

    >>> batch = TextClassBatch(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([1, -100]))
    >>> batch.rows, batch.count
    (2, 1)
    """

    input_ids: Tensor
    labels: Tensor
    mask: Tensor | None = None
    types: Tensor | None = None


@dataclass(frozen=True)
class Padding:
    """What fills rows, and what a model gets next to the tokens.

    Args:
        token: fills rows at their end.
        masks: whether batches have a mask.
        types: whether batches say of which text each token is.
    """

    token: int
    masks: bool
    types: bool


class TextClassRows:
    """Tokens of many texts, one after the other, and their labels.

    Args:
        ids: int32 [tokens of all rows].
        types: uint8, as many.
        ends: int64 [rows], where each row ends in these.
        labels: int64 [rows].
    """

    def __init__(
        self, ids: Tensor, types: Tensor, ends: Tensor, labels: Tensor, padding: Padding
    ) -> None:
        self.labels, self.padding = labels, padding
        self._ids, self._types, self._ends = ids, types, ends
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        self.lengths = ends - starts

    def __len__(self) -> int:
        return len(self.labels)

    def count(self, index: int) -> int:
        """Every row has one label."""
        return 1

    def batch(self, indices: Sequence[int]) -> TextClassBatch:
        """The rows `indices`, in that order, padded to the longest of them."""
        lengths = [int(self.lengths[index]) for index in indices]
        size, padding = (len(lengths), max(lengths)), self.padding
        ids = torch.full(size, padding.token, dtype=torch.int64)
        mask, types = (torch.zeros(size, dtype=torch.int64) for _ in range(2))
        for row, (index, length) in enumerate(zip(indices, lengths, strict=True)):
            part = slice(int(self._ends[index]) - length, int(self._ends[index]))
            ids[row, :length] = self._ids[part]
            types[row, :length] = self._types[part]
            mask[row, :length] = 1
        labels = self.labels[torch.as_tensor(list(indices), dtype=torch.int64)]
        return TextClassBatch(
            ids, labels, mask if padding.masks else None, types if padding.types else None
        )

    def worst(self, rows: int) -> TextClassBatch:
        """The longest row so many times.

        Raises:
            ValueError: no rows are asked for.
        """
        if rows < 1:
            raise ValueError(f"a batch of {rows} rows")
        return self.batch([int(self.lengths.argmax())] * rows)

    def shapes(self, rows: Iterable[int]) -> list[TextClassBatch]:
        """The longest batches of so many rows; shorter ones take less."""
        return [self.worst(size) for size in sorted(set(rows), reverse=True)]


@dataclass(frozen=True)
class EncodedRow:
    """A row's tokens, which text of a pair each is of, and the number of its class."""

    ids: Sequence[int]
    types: Sequence[int]
    label: int


def write_rows(
    folder: Path, rows: Mapping[str, Sequence[EncodedRow]], counts: Mapping[str, Any]
) -> None:
    """Write the tokens of all parts into a folder, atomically.

    Args:
        rows: of each part.
        counts: JSON to keep next to them.
    """
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for side, own in rows.items():
        tensors |= {
            f"{side}.ids": torch.tensor([t for row in own for t in row.ids], dtype=torch.int32),
            f"{side}.types": torch.tensor([t for row in own for t in row.types], dtype=torch.uint8),
            f"{side}.ends": torch.tensor([len(row.ids) for row in own], dtype=torch.int64).cumsum(
                0
            ),
            f"{side}.labels": torch.tensor([row.label for row in own], dtype=torch.int64),
        }
    with publish_folder(folder) as temporary:
        save_file(tensors, temporary / WEIGHTS)
        write_json(temporary / COUNTS, counts)


def read_side(folder: Path, side: str, padding: Padding) -> TextClassRows | None:
    """The rows of one part, mapped and not read; None where it has none.

    Args:
        side: the part's name.
    """
    from safetensors import safe_open

    with safe_open(folder / WEIGHTS, framework="pt") as file:
        if f"{side}.ends" not in file.keys():  # noqa: SIM118 - it is no dict
            return None
        found = [file.get_tensor(f"{side}.{name}") for name in ("ids", "types", "ends", "labels")]
    ids, types, ends, labels = found
    return TextClassRows(ids, types, ends, labels, padding) if len(labels) else None
