"""Sequences of vectors with one label each, from data sets that need no download.

`recall` shows a class in the first step and noise after it, and asks for the class at the end.
`digits` are scikit-learn's 8x8 scans, one row of pixels a step. Sequences of unequal lengths are
padded; the last step of each is its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modicum.core.random import bits, normal_
from modicum.data.batch import LabelledRows
from modicum.data.images import Images, digits


@dataclass(frozen=True)
class SequenceBatch(LabelledRows):
    """Sequences with their labels.

    Args:
        inputs: float32 [B, T, channels]; what follows a sequence's last step is padding.
        lengths: int64 [B], from 1.
        labels: int64 [B], or -100 where none is trained.

    >>> lengths, labels = torch.tensor([3, 2]), torch.tensor([1, -100])
    >>> batch = SequenceBatch(torch.zeros(2, 3, 4), lengths, labels)
    >>> batch.rows, batch.count, batch.last.tolist()
    (2, 1, [2, 1])
    """

    inputs: Tensor
    lengths: Tensor
    labels: Tensor

    @property
    def last(self) -> Tensor:
        """The number of each sequence's last step, from 0."""
        return self.lengths - 1


class LabelledSequences:
    """Rows of one sequence each, in memory.

    Args:
        inputs: float32 [n, T, channels].
        lengths: int64 [n], from 1 to T.
        labels: int64 [n], from 0.
    """

    def __init__(self, inputs: Tensor, lengths: Tensor, labels: Tensor) -> None:
        self._all = SequenceBatch(inputs, lengths, labels)

    def __len__(self) -> int:
        return self._all.rows

    def count(self, index: int) -> int:
        """Every sequence has one label."""
        return 1

    def batch(self, indices: Sequence[int]) -> SequenceBatch:
        """The sequences `indices`, in that order, padded to T steps."""
        chosen, rows = torch.as_tensor(indices, dtype=torch.int64), self._all
        return SequenceBatch(rows.inputs[chosen], rows.lengths[chosen], rows.labels[chosen])

    def worst(self, rows: int) -> SequenceBatch:
        """The first sequences, again where there are fewer: all take as much memory.

        Raises:
            ValueError: no rows are asked for.
        """
        if rows < 1:
            raise ValueError(f"a batch of {rows} rows")
        return self.batch([index % len(self) for index in range(rows)])

    def shapes(self, rows: Iterable[int]) -> list[SequenceBatch]:
        """Batches of so many sequences, the largest first."""
        return [self.worst(size) for size in sorted(set(rows), reverse=True)]


def delayed_recall(
    count: int,
    *,
    length: int,
    classes: int,
    noise: float,
    seed: int,
    first: int = 0,
    shortest: int | None = None,
) -> LabelledSequences:
    """A class in the first step, noise in all others, the class asked for after the last.

    The first step is a one-hot vector, the others are normal numbers. Each sequence is a function
    of the seed and of its number.

    Args:
        count: how many there are.
        noise: deviation of the numbers.
        first: the number of the first one; other numbers are other sequences.
        shortest: lengths are drawn from here to `length`; None: all have `length` steps.

    >>> asked = {"length": 5, "classes": 3, "noise": 0.1, "seed": 0}
    >>> batch = delayed_recall(9, **asked).batch([4, 2])
    >>> batch.inputs.shape, bool((batch.inputs[:, 0].argmax(1) == batch.labels).all())
    (torch.Size([2, 5, 3]), True)
    >>> bool((batch.inputs[0] == delayed_recall(9, first=4, **asked).batch([0]).inputs).all())
    True
    """
    size = length * classes
    inputs = torch.empty(count, length, classes)
    normal_(inputs, seed=seed, name="recall: noise", std=noise, offset=first * size)
    drawn = bits(2 * count, seed=seed, name="recall: label and length", offset=2 * first)
    labels, lengths = drawn[::2] % classes, torch.full((count,), length)
    if shortest is not None:
        lengths = shortest + drawn[1::2] % (length - shortest + 1)
    inputs[:, 0] = torch.nn.functional.one_hot(labels, classes).float()
    inputs *= (torch.arange(length) < lengths[:, None])[..., None]
    return LabelledSequences(inputs, lengths, labels)


def digits_by_rows(seed: int, held_out: int) -> tuple[LabelledSequences, LabelledSequences | None]:
    """scikit-learn's digits as sequences of 8 rows of 8 pixels, some of them held out.

    Source: as `modicum.data.images.digits`.

    Raises:
        InputError: scikit-learn is not installed, or nothing would be left to train on.
    """
    train, held, _ = digits(seed, held_out)

    def by_rows(images: Images) -> LabelledSequences:
        batch = images.batch(range(len(images)))
        rows = batch.images[:, 0, ::4, ::4].contiguous()  # each pixel is a square of 4x4 there
        return LabelledSequences(rows, torch.full_like(batch.labels, 8), batch.labels)

    return by_rows(train), None if held is None else by_rows(held)
