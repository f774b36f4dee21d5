"""Steps of rows of similar length: every row once an epoch, little padding, no state."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from modicum.data.bucket_sampler import BucketSampler
from modicum.data.sampler import Sampler


def padded(sampler: Sampler, lengths: torch.Tensor, steps: int) -> float:
    """The share of padding in so many steps."""
    rows = [lengths[sampler.indices(step)] for step in range(steps)]
    return 1 - sum(int(row.sum()) for row in rows) / sum(len(row) * int(row.max()) for row in rows)


@given(st.lists(st.integers(1, 99), min_size=1, max_size=40), st.integers(1, 12), st.integers(0, 3))
def test_each_row_comes_once_an_epoch(lengths: list[int], batch_size: int, seed: int) -> None:
    rows = len(lengths)
    sampler = BucketSampler(torch.tensor(lengths), batch_size, seed)
    steps = -(-3 * rows // batch_size)
    taken = [row for step in range(steps) for row in sampler.indices(step)]
    for epoch in range(3):
        assert sorted(taken[epoch * rows : (epoch + 1) * rows]) == list(range(rows))
    again = BucketSampler(torch.tensor(lengths), batch_size, seed)
    assert again.indices(steps - 1) == sampler.indices(steps - 1)


def test_little_of_a_step_is_padding_also_where_steps_reach_over_epochs() -> None:
    lengths = torch.randint(1, 257, (1003,), generator=torch.Generator().manual_seed(0))
    steps = 3 * 1003 // 16
    plain = padded(Sampler(1003, 16, 0), lengths, steps)
    assert padded(BucketSampler(lengths, 16, 0), lengths, steps) < 0.15 * plain


def test_epochs_and_seeds_differ_and_long_rows_do_not_come_first() -> None:
    lengths = torch.arange(1, 401)
    sampler, other = BucketSampler(lengths, 8, 0), BucketSampler(lengths, 8, 1)
    first, second = (
        [sampler.indices(step) for step in range(start, start + 50)] for start in (0, 50)
    )
    assert sorted(map(sorted, first)) == sorted(map(sorted, second))
    assert first != second
    assert first[0] != other.indices(0)
    longest = [max(rows) for rows in first]
    assert longest != sorted(longest)
    assert longest != sorted(longest, reverse=True)
