"""Which rows of several sources make up which step."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modicum.core.errors import InputError
from modicum.data.mixed_order import MixedSampler, quotas

SIZES = st.lists(st.integers(1, 30), min_size=2, max_size=4)


@st.composite
def mixes(draw):
    """Sizes of sources, and weights of which none is too small."""
    sizes = draw(SIZES)
    weights = st.lists(st.integers(1, 3), min_size=len(sizes), max_size=len(sizes))
    chosen = draw(st.none() | weights)
    if chosen is not None and sum(sizes) * min(chosen) < sum(chosen):
        chosen = None
    return sizes, chosen


def sampler_of(sizes, weights, batch_size=1, seed=0) -> MixedSampler:
    places = torch.arange(sum(sizes)).split(sizes)
    return MixedSampler(places, weights, batch_size, seed)


@given(mixes())
def test_an_epoch_has_as_many_rows_as_all_sources_in_the_shares_of_their_weights(mix):
    sizes, weights = mix
    found = quotas(sizes, weights)
    assert sum(found) == sum(sizes)
    if weights is None:
        assert found == sizes
    else:
        shares = [sum(sizes) * weight / sum(weights) for weight in weights]
        assert all(abs(a - b) < 1 for a, b in zip(found, shares, strict=True))


@given(mixes(), st.integers(0, 2**40), st.integers(1, 3))
def test_every_epoch_has_each_source_as_often_as_its_share_says(mix, seed, epochs):
    sizes, weights = mix
    sampler = sampler_of(sizes, weights, batch_size=1, seed=seed)
    owner = [number for number, size in enumerate(sizes) for _ in range(size)]
    for epoch in range(epochs):
        steps = range(epoch * sampler.rows, (epoch + 1) * sampler.rows)
        taken = Counter(owner[sampler.indices(step)[0]] for step in steps)
        assert [taken[number] for number in range(len(sizes))] == sampler.quotas


@given(mixes(), st.integers(0, 2**40), st.integers(1, 100))
def test_no_row_of_a_source_is_taken_twice_before_all_were_taken_once(mix, seed, steps):
    sizes, weights = mix
    sampler = sampler_of(sizes, weights, seed=seed)
    taken = Counter(sampler.indices(step)[0] for step in range(steps))
    for rows in torch.arange(sum(sizes)).split(sizes):
        often = [taken[row] for row in rows.tolist()]
        assert max(often) - min(often) <= 1


@given(mixes(), st.integers(0, 60), st.integers(1, 8))
def test_the_sequence_does_not_depend_on_batch_size_or_earlier_steps(mix, step, batch_size):
    sizes, weights = mix
    one_by_one = sampler_of(sizes, weights, seed=5)
    expected = [one_by_one.indices(step * batch_size + n)[0] for n in range(batch_size)]
    assert sampler_of(sizes, weights, batch_size, seed=5).indices(step) == expected


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {
        tuple(sampler_of([20, 10], [1, 1], 30, seed).indices(epoch))
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16


def test_the_order_is_pinned():
    # A changed order would break every run that is resumed with a newer version.
    assert sampler_of([6, 2], [1, 1], 10, seed=3).indices(1) == [6, 6, 3, 7, 1, 3, 6, 2, 4, 7]


def test_the_weight_of_a_source_that_would_give_no_row_is_named():
    with pytest.raises(InputError, match=r"data\.sources\.1\.weight: so small .* 1e-06"):
        quotas([10, 10], [1, 1e-6])
