"""Which rows make up which step: of rows that are there, a function of the step alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from modicum.core.errors import InputError
from modicum.core.random import bits


class Sampler:
    """Rows in a new order each epoch, each once an epoch; batches may reach into the next epoch.

    Sequence n of the run is row `order(n // rows)[n % rows]`, and step s takes the sequences from
    s * batch_size on. So a run resumes exactly from its step number alone, and the order does not
    depend on how many ranks share a batch.

    Args:
        rows: how many there are.
        batch_size: sequences a step, over all ranks.
        seed: of the order.
        shuffle: False takes the rows as they stand, every epoch.

    >>> sampler = Sampler(rows=3, batch_size=2, seed=0, shuffle=False)
    >>> [sampler.indices(step) for step in range(3)]
    [[0, 1], [2, 0], [1, 2]]
    """

    def __init__(self, rows: int, batch_size: int, seed: int, shuffle: bool = True) -> None:
        if rows < 1 or batch_size < 1:
            raise InputError(f"a step needs rows to take: {batch_size} of {rows} are asked for")
        self.rows, self.batch_size, self.seed, self.shuffle = rows, batch_size, seed, shuffle
        # A step is of one epoch, or of two.
        self.order = lru_cache(maxsize=2)(self._drawn)

    def indices(self, step: int) -> list[int]:
        """The rows of one step, counted from 0."""
        start = step * self.batch_size
        taken: list[int] = []
        while len(taken) < self.batch_size:
            epoch, place = divmod(start + len(taken), self.rows)
            stop = place + self.batch_size - len(taken)
            if self.shuffle:
                taken += self.order(epoch)[place:stop].tolist()
            else:
                taken += range(place, min(stop, self.rows))
        return taken

    def epoch_of(self, step: int) -> int:
        """The epoch, counted from 0, of the first sequence of a step."""
        return step * self.batch_size // self.rows

    def state(self) -> dict[str, Any]:
        """What a run that resumes needs to find its rows again (JSON): nothing."""
        return {}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave."""

    def _drawn(self, epoch: int) -> Tensor:
        """A permutation of the rows: int64 [rows]. Rows that draw equal words keep their order."""
        words = bits(self.rows, seed=self.seed, name="data order", step=epoch)
        return torch.argsort(words, stable=True)
