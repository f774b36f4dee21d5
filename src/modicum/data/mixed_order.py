"""The order of several sources' rows: how many each gives to an epoch, and which step has which."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import floor

import torch
from torch import Tensor

from modicum.core.errors import InputError
from modicum.core.random import derive_seed
from modicum.data.sampler import Sampler


def quotas(rows: Sequence[int], weights: Sequence[float] | None = None) -> list[int]:
    """How many rows each source gives to an epoch, which has as many as all sources together.

    Args:
        rows: of each source, how many it has.
        weights: of each, above 0; its part of their sum is its share of an epoch's rows, rounded by
            the largest remainders. None: each row once.

    Raises:
        InputError: a weight is so small that its source gives no row.

    >>> quotas([90, 10]), quotas([90, 10], [1, 1]), quotas([90, 10], [2, 1])
    ([90, 10], [50, 50], [67, 33])
    """
    if weights is None:
        return list(rows)
    total = sum(rows)
    asked = [total * weight / sum(weights) for weight in weights]
    given = [floor(share) for share in asked]
    by_remainder = sorted(range(len(rows)), key=lambda n: given[n] - asked[n])
    for number in by_remainder[: total - sum(given)]:
        given[number] += 1
    if 0 in given:
        number = given.index(0)
        raise InputError(
            f"so small that none of an epoch's {total} rows is from this source",
            field=f"data.sources.{number}.weight",
            value=weights[number],
        )
    return given


class MixedSampler(Sampler):
    """Rows of several sources, a fixed number of each an epoch, in a new order each epoch.

    Which source a sequence of the run is from is shuffled within each epoch. A source's own rows
    come in a new order each time that all of them were taken, whatever the epoch: one whose share
    is larger than its rows is repeated, and one whose share is smaller continues in the next epoch
    where it stopped. So at any step the rows of a source were taken equally often, or once more.
    Like the plain sampler it is a function of seed and step.

    Args:
        places: of each source the numbers of its rows: int64 [rows] each.
        weights: as `quotas` has them.
        batch_size: sequences a step, over all ranks.
        seed: of the order.

    >>> both = MixedSampler([torch.arange(3), torch.arange(3, 9)], [1, 1], 9, seed=0)
    >>> both.quotas, sum(row < 3 for row in both.indices(0))
    ([5, 4], 5)
    """

    def __init__(
        self,
        places: Sequence[Tensor],
        weights: Sequence[float] | None,
        batch_size: int,
        seed: int,
    ) -> None:
        self.quotas = quotas([len(each) for each in places], weights)
        super().__init__(sum(self.quotas), batch_size, seed)
        self._places = places
        self._own = [
            Sampler(len(each), 1, derive_seed(seed, f"data order of source {number}"))
            for number, each in enumerate(places)
        ]
        self._turns = lru_cache(maxsize=2)(self._drawn_turns)

    def indices(self, step: int) -> list[int]:
        """The rows of one step."""
        first = step * self.batch_size
        taken: list[int] = []
        while len(taken) < self.batch_size:
            epoch, place = divmod(first + len(taken), self.rows)
            sources, before = self._turns(epoch)
            some = slice(place, place + self.batch_size - len(taken))
            pairs = zip(sources[some].tolist(), before[some].tolist(), strict=True)
            taken += [self._row(epoch, source, number) for source, number in pairs]
        return taken

    def _row(self, epoch: int, source: int, number: int) -> int:
        """The row that a source gives after `number` others in an epoch."""
        places = self._places[source]
        again, place = divmod(epoch * self.quotas[source] + number, len(places))
        return int(places[self._own[source].order(again)[place]])

    def _drawn_turns(self, epoch: int) -> tuple[Tensor, Tensor]:
        return turns(self.quotas, self.order(epoch))


def turns(quotas: Sequence[int], order: Tensor) -> tuple[Tensor, Tensor]:
    """The source of each place of an epoch, and how many of its rows come before it there.

    Args:
        order: a permutation of as many places as the quotas have together: int64.
    """
    ends = torch.tensor(quotas).cumsum(0)
    sources = torch.searchsorted(ends, order, right=True).to(torch.int16)
    before = torch.empty(len(order), dtype=torch.int64)
    for number, quota in enumerate(quotas):
        before[sources == number] = torch.arange(quota)
    return sources, before
