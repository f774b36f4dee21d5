"""Rows of similar length in one step, so that little of a padded batch is padding."""

from __future__ import annotations

import torch
from torch import Tensor

from modicum.core.random import bits
from modicum.data.sampler import Sampler

# Rows of so many steps are sorted by length: more leave less padding, and mix rows less.
WINDOW = 50


class BucketSampler(Sampler):
    """The rows in a new order each epoch, in which those of one step are about equally long.

    The order of a plain sampler is taken in windows of `WINDOW` steps; in each the rows are sorted
    by length and form steps, and the steps of the epoch are shuffled. So each row comes once an
    epoch, and which rows a step has is a function of seed and step, whatever the ranks. A step that
    reaches into the next epoch, and an epoch's last rows, are of mixed lengths.

    Args:
        lengths: int64 [rows], tokens of each row.
        batch_size: rows a step, over all ranks.
        seed: of the order.

    >>> sampler = BucketSampler(torch.tensor([9, 1, 8, 2]), batch_size=2, seed=0)
    >>> sorted(sorted(sampler.indices(step)) for step in range(2))
    [[0, 2], [1, 3]]
    """

    def __init__(self, lengths: Tensor, batch_size: int, seed: int) -> None:
        super().__init__(len(lengths), batch_size, seed)
        self._lengths = lengths

    def _drawn(self, epoch: int) -> Tensor:
        order = super()._drawn(epoch)
        begun = -epoch * self.rows % self.batch_size  # these complete the last epoch's last step
        steps: list[Tensor] = []
        for window in order[begun:].split(WINDOW * self.batch_size):
            by_length = torch.argsort(self._lengths[window], stable=True, descending=True)
            steps += window[by_length].split(self.batch_size)
        last = [steps.pop()] if steps and len(steps[-1]) < self.batch_size else []
        words = bits(max(len(steps), 1), seed=self.seed, name="order of buckets", step=epoch)
        shuffled = [steps[place] for place in torch.argsort(words, stable=True)[: len(steps)]]
        return torch.cat([order[:begun], *shuffled, *last])
