"""An update's rows, split over ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from modicum.core.ranks.ranks import Ranks
from modicum.data.rows import B, Rows


def share(indices: Sequence[int], ranks: Ranks) -> Sequence[int]:
    """This rank's part of an update's rows: neighbours, and as many as the others' or one fewer.

    >>> [share(range(5), Ranks(rank, 2)) for rank in range(2)]
    [range(0, 2), range(2, 5)]
    """
    count = len(indices)
    return indices[count * ranks.rank // ranks.size : count * (ranks.rank + 1) // ranks.size]


def micro_batches(
    data: Rows[B], indices: Sequence[int], size: int, ranks: Ranks | None = None
) -> Iterator[B]:
    """This rank's rows in micro-batches of at most `size` rows, as many on every rank.

    All ranks run as many forward passes, because each may be an exchange. One that has no rows left
    for a micro-batch runs a row in which nothing is trained, so it adds nothing to loss, count and
    gradients.

    Args:
        indices: the rows of the full update, over all ranks; at least one.
    """
    ranks = ranks or Ranks()
    own = share(indices, ranks)
    most = -(-len(indices) // ranks.size)
    for first in range(0, most, size):
        if first < len(own):
            yield data.batch(own[first : first + size])
        else:
            yield data.batch(indices[:1]).idle()


def counted(data: Rows[B], indices: Sequence[int], ranks: Ranks | None = None) -> int:
    """What this rank's rows add to the count of an update."""
    return sum(data.count(index) for index in share(indices, ranks or Ranks()))
