"""A total shared over layers: exact against every choice, deterministic, and fast at real sizes."""

from __future__ import annotations

from itertools import product
from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modicum.core.errors import InputError
from modicum.core.layers import allocate as module
from modicum.core.layers.allocate import GainCurve, allocate, in_proportion


@st.composite
def curves(draw: st.DrawFn) -> dict[str, GainCurve]:
    found = {}
    for name in "abcd"[: draw(st.integers(1, 4))]:
        count = draw(st.integers(1, 5))
        amounts = sorted(draw(st.sets(st.integers(0, 20), min_size=count, max_size=count)))
        costs = draw(st.lists(st.integers(0, 30), min_size=count, max_size=count))
        values = draw(st.lists(st.integers(-20, 40), min_size=count, max_size=count))
        found[name] = GainCurve(tuple(amounts), tuple(costs), tuple(map(float, values)))
    return found


def best(given_: dict[str, GainCurve], total: int) -> float:
    """The largest value of all choices that the total allows."""
    choices = product(*(zip(c.costs, c.values, strict=True) for c in given_.values()))
    sums = ([sum(part) for part in zip(*choice, strict=True)] for choice in choices)
    return max((value for cost, value in sums if cost <= total), default=-inf)


@given(curves(), st.integers(0, 90))
def test_it_is_the_best_of_all_choices(given_: dict[str, GainCurve], total: int) -> None:
    expected = best(given_, total)
    if expected == -inf:
        with pytest.raises(InputError, match="least amounts cost"):
            allocate(given_, total)
        return
    found = allocate(given_, total)
    assert found.value == found.at_most == expected
    assert found.cost <= total
    for name, amount in found.amounts.items():
        assert amount in given_[name].amounts
    assert allocate(dict(given_), total) == found


@given(
    st.lists(st.lists(st.floats(0, 9), min_size=1, max_size=6), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(0, 60),
)
def test_units_of_one_cost_are_taken_best_first(
    gains: list[list[float]], cost: int, total: int
) -> None:
    falling = {
        str(n): GainCurve.of_gains(sorted(each, reverse=True), cost=cost)
        for n, each in enumerate(gains)
    }
    assert allocate(falling, total).value == pytest.approx(best(falling, total))


def test_floors_caps_and_multiples() -> None:
    curve = GainCurve.of_gains([1.0] * 20, cost=3, floor=2, cap=17, multiple=8)
    assert curve.amounts == (2, 8, 16, 17)
    assert curve.costs == (6, 24, 48, 51)
    with pytest.raises(InputError, match="floor"):
        GainCurve.of_gains([1.0], cost=1, floor=2)
    with pytest.raises(InputError, match="nanoseconds"):
        GainCurve((1,), (0.5,), (1.0,))


def spectra(layers: int, width: int) -> dict[str, GainCurve]:
    """Ranks of layers of two shapes, by the squares of made-up singular values."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for layer in range(layers):
        decay = 0.5 + torch.rand((), generator=generator).item()
        values = (torch.arange(1, width + 1).double() ** -decay).square() * (1 + layer % 7)
        cost = width * (2 + layer % 3)
        found[str(layer)] = GainCurve.of_gains(values.tolist(), cost=cost, multiple=8)
    return found


def test_at_the_size_of_a_model_nothing_that_fits_is_left_and_no_swap_is_better() -> None:
    given_ = spectra(224, 512)
    total = sum(curve.costs[-1] for curve in given_.values()) // 3
    found = allocate(given_, total)
    assert total - found.cost < 512 * 8 * 2
    assert found.value <= found.at_most <= found.value * (1 + 1e-6)


def test_past_its_limit_it_says_how_far_the_best_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    given_ = {}
    for name in range(12):
        costs = torch.randint(1, 10_000, (6,), generator=generator).sort().values
        values = costs + torch.randint(0, 50, (6,), generator=generator)
        given_[str(name)] = GainCurve(
            tuple(range(6)), tuple(costs.tolist()), tuple(values.double().tolist())
        )
    exact = allocate(given_, 30_000)
    assert exact.at_most == exact.value
    monkeypatch.setattr(module, "_STATES", 4)
    rough = allocate(given_, 30_000)
    assert rough.value <= exact.value <= rough.at_most


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 40)), min_size=1, max_size=6),
    st.floats(0, 1),
)
def test_shares_add_up_and_keep_their_caps_and_the_scores_order(
    layers: list[tuple[int, int]], part: float
) -> None:
    scores = {str(name): float(score) for name, (score, _) in enumerate(layers)}
    caps = {str(name): cap for name, (_, cap) in enumerate(layers)}
    total = int(part * sum(caps.values()))
    found = in_proportion(scores, total, caps)
    assert sum(found.values()) == total
    assert all(0 <= found[name] <= caps[name] for name in caps)
    free = [name for name in caps if found[name] < caps[name]]
    for one, other in product(free, free):
        if scores[one] > scores[other]:
            assert found[one] >= found[other] - 1
        if scores[one] > 0 == scores[other]:
            assert not found[other]


def test_what_capped_layers_leave_is_handed_out_again_in_proportion() -> None:
    caps = {"a": 10, "b": 100, "c": 100}
    assert in_proportion({"a": 98.0, "b": 1.0, "c": 1.0}, 50, caps) == {"a": 10, "b": 20, "c": 20}
    assert in_proportion({"a": 0.0, "b": 3.0, "c": 1.0}, 80, caps) == {"a": 0, "b": 60, "c": 20}
    # No score says anything: each gets the same part of what it may have.
    assert in_proportion(dict.fromkeys(caps, 0.0), 21, caps) == {"a": 1, "b": 10, "c": 10}
    with pytest.raises(InputError, match="more than layers may have"):
        in_proportion({"a": 1.0}, 11, caps)
    with pytest.raises(InputError, match="no share"):
        in_proportion({"a": float("nan")}, 1, caps)
