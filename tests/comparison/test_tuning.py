from __future__ import annotations

import json
import math
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modicum.comparison import OneOf, Outcome, Settings, Side, TrialRange
from modicum.comparison.tuning import SAMPLERS, SearchSampler, SideTuning, check_sampler
from modicum.core.errors import InputError

RATE = TrialRange(1e-4, 1e-1, 1e-3)
SIDE = Side("a", {"rate": RATE, "rank": TrialRange(1, 8, 4), "k": OneOf(("x", "y", "z"), "y")})
STATUSES = ("finished", "diverged", "out_of_memory", "crashed", "refused")


def ended(values: Settings, status: str = "finished") -> Outcome:
    loss = math.log10(values.get("rate", 1) / 0.02) ** 2 + values.get("rank", 0) / 100
    return Outcome(status, loss)  # type: ignore[arg-type]


def searched(
    side: Side, sampler: SearchSampler, trials: int, seed: int = 0, stops: tuple[int, ...] = ()
) -> list[Settings]:
    """What is tried; at each of `stops` the search is made anew and is given the trials so far."""
    search, tried = SideTuning(side, sampler, seed, 4), list[Settings]()
    while len(tried) < trials and (batch := search.ask()):
        for values in batch[: trials - len(tried)]:
            status = STATUSES[len(tried) % 7] if len(tried) % 7 < 5 else "finished"
            search.tell(values, ended(values, status))
            tried.append(values)
            if len(tried) in stops:
                again = SideTuning(side, sampler, seed, 4)
                for one in search.tried:
                    again.tell(one.settings, one.outcome)
                search = again
                break
    return tried


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_defaults_come_first_and_nothing_twice(sampler: SearchSampler) -> None:
    tried = searched(SIDE, sampler, 20)
    assert tried[0] == SIDE.defaults()
    assert len({json.dumps(one) for one in tried}) == 20
    for one in tried:
        assert 1e-4 <= one["rate"] <= 1e-1
        assert one["rank"] in range(1, 9)
        assert one["k"] in "xyz"


@pytest.mark.expensive
@pytest.mark.parametrize("sampler", SAMPLERS)
@settings(max_examples=8, deadline=None)
@given(stops=st.sets(st.integers(1, 13)).map(tuple), seed=st.integers(0, 99))
def test_neither_stops_nor_the_number_of_trials_change_what_is_tried(
    sampler: SearchSampler, stops: tuple[int, ...], seed: int
) -> None:
    tried = searched(SIDE, sampler, 14, seed)
    assert searched(SIDE, sampler, 14, seed, stops) == tried
    assert searched(SIDE, sampler, 7, seed) == tried[:7]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_sides_with_equal_ranges_begin_with_equal_settings_and_seeds_differ(
    sampler: SearchSampler,
) -> None:
    other = Side("b", {f"of.{name}": one for name, one in SIDE.space.items()})
    first = [tuple(one.values()) for one in searched(SIDE, sampler, 4)]
    search = SideTuning(other, sampler, 0, 4)
    assert [tuple(one.values()) for one in search.ask()] == first
    assert [tuple(one.values()) for one in searched(SIDE, sampler, 4, seed=1)] != first


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_small_space_is_left_when_all_was_tried(sampler: SearchSampler) -> None:
    side = Side("a", {"rank": TrialRange(1, 3, 2), "k": OneOf((True, False), False)})
    tried = searched(side, sampler, 50)
    assert sorted(map(json.dumps, tried)) == sorted(map(json.dumps, side.points()))
    assert searched(Side("nothing"), sampler, 5) == [{}]


def test_grids_become_finer_and_keep_their_points() -> None:
    side = Side("a", {"x": TrialRange(1e-4, 1.0, 1e-2)})
    tried = [one["x"] for one in searched(side, "grid", 9)]
    assert sorted(tried[:3]) == pytest.approx([1e-4, 1e-2, 1.0])
    assert sorted(tried) == pytest.approx([10 ** (-4 + i / 2) for i in range(9)], rel=1e-3)


def test_the_estimator_looks_where_losses_are_less() -> None:
    side = Side("a", {"rate": TrialRange(1e-6, 1.0, 1e-5)})
    search = SideTuning(side, "tpe", 0, 4)
    while len(search.tried) < 24:
        for values in search.ask():
            search.tell(values, ended(values))
    later = [math.log10(one.settings["rate"] / 0.02) for one in search.tried[12:]]
    assert sorted(map(abs, later))[6] < 1.0  # of six decades, evenly spread this would be 1.5


def test_leaders_are_judged_by_their_mean() -> None:
    search = SideTuning(SIDE, "grid", 0, 4)
    for place, loss in enumerate((1.0, 0.9, 0.8, None)):
        outcome = Outcome("finished", loss) if loss else Outcome("crashed")
        search.tell({"rate": 0.01, "rank": place + 1, "k": "x"}, outcome)
    assert (search.best, search.chosen, search.leaders(2)) == (2, 2, [2, 1])
    search.repeated = {2: [Outcome("finished", 1.2)], 1: [Outcome("finished", 0.9)]}
    assert (search.best, search.chosen, search.score(1)) == (2, 1, 0.9)
    search.repeated = {2: [Outcome("finished", 1.2)], 1: [Outcome("diverged")]}
    assert search.chosen == 2


def test_after_widening_a_value_beyond_the_edge_comes_first() -> None:
    search = SideTuning(Side("a", {"rate": TrialRange(1e-4, 1e-2, 1e-2)}), "tpe", 0, 4)
    for values in search.ask():
        search.tell(values, ended(values))
    assert search.edges() == {"rate": 1e-2}
    search.begin_round(search.edges())
    first = search.ask()[0]["rate"]
    assert 1e-2 < first < search.side.dimensions["rate"].high == pytest.approx(0.1)


def test_an_edge_that_cannot_be_widened_is_none() -> None:
    span = TrialRange(1e-4, 1e-2, 1e-2, bounds=(0, 1e-2))
    search = SideTuning(Side("a", {"rate": span}), "grid", 0, 4)
    search.tell({"rate": 1e-2}, ended({"rate": 1e-2}))
    assert search.edges() == {}


def test_without_optuna_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(InputError, match=r"needs optuna.*pip install 'modicum\[tuning\]'"):
        SideTuning(SIDE, "tpe", 0, 4)
    assert SideTuning(SIDE, "grid", 0, 4).ask()[0] == SIDE.defaults()


def test_another_sampler_is_refused() -> None:
    with pytest.raises(InputError, match=r"no such sampler.*Did you mean 'random'"):
        check_sampler("randon")
