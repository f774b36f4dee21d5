from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.core.errors import InputError
from modicum.data import Sampler


@given(
    st.integers(1, 40), st.integers(1, 17), st.integers(0, 2**40), st.booleans(), st.integers(1, 4)
)
def test_every_epoch_takes_every_row_once(rows, batch_size, seed, shuffle, epochs):
    sampler = Sampler(rows, batch_size, seed, shuffle)
    steps = -(-rows * epochs // batch_size)
    batches = [sampler.indices(step) for step in range(steps)]
    assert all(len(batch) == batch_size for batch in batches)
    sequence = [row for batch in batches for row in batch]
    for epoch in range(epochs):
        part = sequence[epoch * rows : (epoch + 1) * rows]
        assert sorted(part) == list(range(rows))
        if not shuffle:
            assert part == list(range(rows))


@given(st.integers(0, 200), st.integers(1, 8))
def test_the_sequence_does_not_depend_on_the_batch_size(step, batch_size):
    one_by_one = Sampler(13, 1, seed=5)
    expected = [one_by_one.indices(step * batch_size + n)[0] for n in range(batch_size)]
    assert Sampler(13, batch_size, seed=5).indices(step) == expected


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {
        tuple(Sampler(30, 30, seed).indices(epoch)) for seed in range(4) for epoch in range(4)
    }
    assert len(orders) == 16


def test_the_order_is_pinned():
    # A changed order would break every run that is resumed with a newer version.
    assert Sampler(8, 10, seed=3).indices(1) == [6, 5, 0, 4, 1, 3, 4, 1, 3, 5]


def test_first_places_are_uniform():
    first = [Sampler(5, 1, seed).indices(0)[0] for seed in range(1000)]
    assert all(150 < first.count(row) < 250 for row in range(5))


def test_epoch_of_a_step_is_that_of_its_first_sequence():
    sampler = Sampler(10, 4, seed=0)
    assert [sampler.epoch_of(step) for step in range(6)] == [0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize(("rows", "batch_size"), [(0, 1), (1, 0)])
def test_nothing_to_take_is_an_error(rows, batch_size):
    with pytest.raises(InputError, match=f"{batch_size} of {rows} are asked for"):
        Sampler(rows, batch_size, seed=0)
