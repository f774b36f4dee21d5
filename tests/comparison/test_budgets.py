"""Budgets: what is read, how large a side becomes, how many updates fit into seconds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.comparison.budgets import SharedBudget, Sized, set_in, sized, spent_of, steps_for
from modicum.core.contracts.ledger import Entry, Ledger
from modicum.core.errors import DoesNotFit, InputError
from modicum.recipe import Recipe

BASE = Recipe(model={"path": "base"}, adapter={"method": "lora", "rank": 1})


@pytest.mark.parametrize(
    ("text", "kind", "amount"),
    [
        ("tokens=500k", "tokens", 500_000),
        ("tokens=2M", "tokens", 2_000_000),
        ("seconds=2.5", "seconds", 2.5),
        ("state=8MB", "state", 8_000_000),
        ("peak=2GiB", "peak", 2**31),
        ("trained=100kB", "trained", 100_000),
    ],
)
def test_a_budget_is_read(text: str, kind: str, amount: float) -> None:
    assert SharedBudget.parse(text) == SharedBudget(kind, amount)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    ["", "tokens", "tokens=", "token=5k", "tokens=-3", "seconds=0", "seconds=nan", "state=8 cats",
     "seconds=inf", "peak=0"],
)  # fmt: skip
def test_what_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        SharedBudget.parse(text)
    assert caught.value.field == "--budget"


def plan_of(recipe: Recipe) -> Any:
    """A plan whose bytes are 1,000 for each of the adapter's rank; of no adapter 5,000."""
    rank = 5 if recipe.adapter is None else recipe.adapter["rank"]
    if rank > 64:
        raise InputError("above the width", field="adapter.rank", value=rank)
    ledger = Ledger.of(Entry("optimizer", 1000 * rank), Entry("weight", 7))
    return SimpleNamespace(
        prediction=SimpleNamespace(ledger=ledger, peak_bytes=1000 * rank + 7, trainable=250 * rank)
    )


@pytest.mark.parametrize("kind", ["state", "peak", "trained"])
def test_bytes_are_those_of_the_forecast(kind: str) -> None:
    expected = {"state": 1000, "peak": 1007, "trained": 1000}
    assert spent_of(plan_of(BASE), kind) == expected[kind]


@given(amount=st.integers(1000, 200_000), most=st.integers(1, 200))
def test_the_largest_size_within_the_budget_is_taken(amount: int, most: int) -> None:
    budget = SharedBudget("state", amount)
    found = sized(BASE, budget, "adapter.rank", range(1, most + 1), plan_of)
    rank = found.settings["adapter.rank"]
    assert found.bytes == 1000 * rank <= amount
    assert rank == min(most, 64, amount // 1000)


def test_a_budget_below_the_smallest_size_does_not_fit() -> None:
    with pytest.raises(DoesNotFit, match=r"adapter\.rank 1, takes 1 kB, and .* is state 999 B"):
        sized(BASE, SharedBudget("state", 999), "adapter.rank", [1, 2], plan_of)


def test_a_side_without_a_size_is_a_reference() -> None:
    full = Recipe()
    found = sized(full, SharedBudget("state", 10), None, (), plan_of)
    why = "has 5 kB of optimizer state, not 10 B: it has no size that could be changed"
    assert found == Sized({}, 5000, reference=True, unequal=why)
    near = sized(full, SharedBudget("peak", 5100), None, (), plan_of)
    assert near == Sized({}, 5007, reference=True)


def test_a_side_far_from_the_budget_says_why() -> None:
    budget, sizes = SharedBudget("state", 30_000), [10, 20, 40, 70]
    found = sized(BASE, budget, "adapter.rank", sizes, plan_of)
    assert found.settings == {"adapter.rank": 20}
    assert found.unequal == (
        "has 20 kB of optimizer state, not 30 kB: adapter.rank 20 is the last below it, and with "
        "40 it would have 40 kB"
    )
    largest = sized(BASE, SharedBudget("trained", 90_000), "adapter.rank", sizes, plan_of)
    assert largest.unequal == (
        "has 40 kB of trained weights, not 90 kB: adapter.rank 40 is the largest that it takes"
    )
    assert not sized(BASE, SharedBudget("state", 20_600), "adapter.rank", sizes, plan_of).unequal


@given(amount=st.integers(7000, 57_000))
def test_a_size_that_is_no_integer_is_near_enough(amount: int) -> None:
    asked = []

    def plan(recipe: Recipe) -> Any:
        assert recipe.linear is not None
        asked.append(recipe.linear["share"])
        ledger = Ledger.of(Entry("optimizer", int(64_000 * asked[-1])))
        return SimpleNamespace(prediction=SimpleNamespace(ledger=ledger))

    recipe = Recipe(linear={"method": "low_rank"})
    sizes = [place / 1000 for place in range(100, 900)]
    found = sized(recipe, SharedBudget("state", amount), "linear.share", sizes, plan)
    largest = max(size for size in sizes if int(64_000 * size) <= amount)
    assert min(0.995 * amount, int(64_000 * largest)) <= found.bytes <= amount
    assert not found.unequal
    assert len(asked) <= 12


@given(amount=st.integers(1000, 9000), taken=st.integers(60, 99), few=st.booleans())
def test_a_larger_value_may_mean_a_smaller_method(amount: int, taken: int, few: bool) -> None:
    """Of pruning: layers of 10 kB lose a share, at most so much of it."""

    def plan(recipe: Recipe) -> Any:
        assert recipe.linear is not None
        if recipe.linear["share"] > taken / 100:
            raise InputError("nothing is left", field="linear.share")
        ledger = Ledger.of(Entry("optimizer", round(10_000 * (1 - recipe.linear["share"]))))
        return SimpleNamespace(prediction=SimpleNamespace(ledger=ledger))

    recipe, budget = Recipe(linear={"method": "low_rank"}), SharedBudget("state", amount)
    shares = [0.1, 0.3, 0.5, 0.98] if few else [place / 100 for place in range(10, 99)]
    known = [share for share in shares if share <= taken / 100]
    if round(10_000 * (1 - max(known))) > amount:
        with pytest.raises(DoesNotFit, match=f"linear.share {max(known)}, takes"):
            sized(recipe, budget, "linear.share", shares, plan)
        return
    found = sized(recipe, budget, "linear.share", shares, plan)
    largest = min(share for share in known if round(10_000 * (1 - share)) <= amount)
    least = min(round(10_000 * (1 - largest)), 0.995 * amount)
    assert least <= found.bytes <= amount


@given(
    st.floats(0.01, 1e4), st.lists(st.lists(st.floats(1e-4, 1.0), min_size=1), min_size=1)
)  # fmt: skip
def test_steps_keep_the_seconds(seconds: float, times: list[list[float]]) -> None:
    values = sorted(value for each in times for value in each)
    budget = SharedBudget("seconds", seconds)
    try:
        steps = steps_for(budget, times, 0)
    except InputError:
        assert 0.95 * seconds < values[-1]
        return
    assert steps * values[0] <= 0.95 * seconds * 1.0001
    assert (steps + 1) * values[-1] > 0.95 * seconds * 0.9999


def test_seconds_too_few_for_the_warm_up_are_refused() -> None:
    with pytest.raises(InputError, match="enough for 9 updates, and the warm-up alone needs 20"):
        steps_for(SharedBudget("seconds", 1.0), [[0.1]], 20)
    with pytest.raises(InputError, match="enough for 9 updates, and the warm-up alone needs 9"):
        steps_for(SharedBudget("seconds", 1.0), [[0.1]], 9)
    assert steps_for(SharedBudget("seconds", 1.0), [[0.1]], 8) == 9
    with pytest.raises(InputError, match=r"enough for 0 updates \(found"):
        steps_for(SharedBudget("seconds", 1.0), [[3.0]], 0)


def test_updates_of_which_none_was_timed_are_said_to_be_so() -> None:
    with pytest.raises(InputError, match=r"--budget: its updates could not be timed.*seconds=10"):
        steps_for(SharedBudget("seconds", 10), [[], []], 0)


def test_settings_are_put_in_by_their_paths() -> None:
    made = set_in(BASE, {"training.learning_rate": 0.5, "adapter.rank": 3})
    assert made.training.learning_rate == 0.5
    assert made.adapter == {"method": "lora", "rank": 3}
