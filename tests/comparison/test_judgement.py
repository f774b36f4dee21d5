from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.comparison import Outcome, judged
from modicum.comparison.luck import Selection
from modicum.core.intervals import bootstrap_interval, holm, p_value, t_interval

stats: Any = pytest.importorskip("scipy.stats")
LOSSES = st.lists(st.floats(-1e3, 1e3).map(lambda x: round(x, 6)), min_size=2, max_size=9)


def outcomes(**losses: Sequence[float | str]) -> dict[str, dict[int, Outcome]]:
    """A side's losses by seed; a text is another status."""
    return {
        side: {
            seed: Outcome(loss) if isinstance(loss, str) else Outcome("finished", loss, {"t": 1.0})  # type: ignore[arg-type]
            for seed, loss in enumerate(values)
        }
        for side, values in losses.items()
    }


@given(LOSSES)
def test_interval_and_p_are_scipy_s(values: list[float]) -> None:
    interval, p = t_interval(values), p_value(values)
    assert interval is not None
    assert p is not None
    if len(set(values)) == 1:
        assert interval[0] == interval[1]
        assert p == float(values[0] == 0)
    else:
        expected = stats.ttest_1samp(values, 0)
        assert p == pytest.approx(expected.pvalue, abs=1e-9)
        assert interval == pytest.approx(expected.confidence_interval(), rel=1e-6, abs=1e-6)


def test_one_value_has_neither_interval_nor_p() -> None:
    assert [f([1.0]) for f in (t_interval, bootstrap_interval, p_value)] == [None] * 3


def test_the_bootstrap_is_that_of_its_seed_and_near_the_normal_interval() -> None:
    draw = random.Random(0)
    values = [draw.gauss(1, 2) for _ in range(400)]
    first = bootstrap_interval(values, seed=1)
    assert first == bootstrap_interval(values, seed=1) != bootstrap_interval(values, seed=2)
    assert first == pytest.approx(t_interval(values), abs=0.03)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_rejects_as_its_steps_do(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    for level in (0.05, 0.3):
        rejected, order = set(), sorted(range(len(p_values)), key=p_values.__getitem__)
        for rank, place in enumerate(order):
            if p_values[place] * (len(p_values) - rank) > level:
                break
            rejected.add(place)
        assert {i for i, p in enumerate(adjusted) if p is not None and p <= level} == rejected
    assert all(new is not None and new >= old for new, old in zip(adjusted, p_values, strict=True))


@pytest.mark.expensive
@given(LOSSES, LOSSES, st.permutations(range(3)))
def test_the_verdict_follows_the_interval_and_no_order(
    one: list[float], other: list[float], order: list[int]
) -> None:
    n = min(len(one), len(other))
    by_name = {"a": one[:n], "b": other[:n]}
    found = judged(outcomes(**by_name))
    (difference,) = found.differences
    assert difference.interval is not None
    if difference.p not in (0.0, 1.0) and abs((difference.p or 0) - 0.05) > 1e-9:
        outside = not difference.interval[0] <= 0 <= difference.interval[1]
        assert (difference.verdict == "worse") is outside
        assert found.winner == (difference.against if outside else None)
    assert difference.verdict != "better"  # than the least mean
    seeds = list(range(n))[:: -1 if order[0] else 1]
    turned = {
        side: {seed: by_seed[seed] for seed in seeds}
        for side, by_seed in outcomes(**by_name).items()
    }
    assert judged(turned) == found


def test_against_a_baseline_a_side_is_better_or_worse() -> None:
    base = [1.0, 1.2, 1.1, 1.3, 0.9]
    runs = outcomes(
        base=[*base],
        good=[x - 0.5 + y for x, y in zip(base, (0, 0.01, 0.02, 0.01, 0), strict=True)],
        bad=[x + 0.5 + y for x, y in zip(base, (0, 0.01, 0.02, 0.01, 0), strict=True)],
        same=[x + y for x, y in zip(base, (0.01, -0.02, 0.02, -0.01, 0.001), strict=True)],
    )
    found = judged(runs, baseline="base")
    assert {one.side: one.verdict for one in found.differences} == {
        "good": "better",
        "bad": "worse",
        "same": "no difference shown",
    }
    assert all(one.against == "base" for one in found.differences)
    assert found.winner is None  # `good` was not compared with the others
    assert judged(runs).winner == "good"
    good = next(one for one in found.differences if one.side == "good")
    assert good.mean == pytest.approx(-0.492)
    assert good.p is not None
    assert good.adjusted_p is not None
    assert good.adjusted_p > good.p
    json.dumps(found.to_json(), allow_nan=False)


def test_more_pairs_ask_for_more() -> None:
    base = [0.0, 0.0, 0.0, 0.0, 0.0]
    shifted = [0.1, 0.35, 0.2, 0.05, 0.3]  # p is 0.027 alone
    (alone,) = judged(outcomes(a=[*base], b=[*shifted])).differences
    assert alone.verdict == "worse"
    other = judged(outcomes(a=[*base], b=[*shifted], c=[*shifted])).differences[0]
    assert other.verdict == "no difference shown"
    assert "Holm" in other.reason
    few = judged(outcomes(a=base[:3], b=[1.0, 1.1, 1.2])).differences[0]
    assert (few.verdict, few.reason) == ("worse", "fewer than 5 seeds")


def test_no_mean_is_claimed_where_a_seed_has_no_loss() -> None:
    runs = outcomes(
        good=[1.0, 1.1, 1.2],
        wild=[0.1, "diverged", "diverged"],
        dead=[0.1, "crashed", "out_of_memory"],
    )
    del runs["dead"][0]
    found = judged(runs)
    assert found.reference == "good"
    assert [one.mean for one in found.standings] == [pytest.approx(1.1), None, None]
    assert [one.reason for one in found.differences] == [
        "wild diverged in 2 of 3 seeds: no mean is claimed",
        "dead crashed in 1 of 3 seeds, out of memory in 1 of 3 seeds, was not run in 1 of 3 "
        "seeds: no mean is claimed",
    ]
    assert {one.verdict for one in found.differences} == {"not judged"}
    assert found.winner is None
    losses = found.to_json()["standings"][1]["losses"]
    assert losses == [0.1, "diverged", "diverged"]
    against = judged(runs, baseline="wild").differences
    assert [one.verdict for one in against] == ["not judged", "not judged"]


def test_nothing_at_all_is_no_verdict() -> None:
    found = judged({"a": {}, "b": {}})
    assert (found.reference, found.differences, found.winner) == (None, (), None)
    test = judged(outcomes(a=[1.0, 2.0], b=[2.0, 3.0]), figure="u")
    assert {one.problem for one in test.standings} == {"has no figure in 2 of 2 seeds"}
    assert math.isclose(judged(outcomes(a=[1.0], b=[3.0])).differences[0].mean or 0, 2.0)


def test_luck_of_tuning_widens_the_interval_and_may_take_a_verdict_away() -> None:
    runs = outcomes(a=[1.0, 1.1, 1.2, 1.0, 1.1], b=[1.2, 1.25, 1.45, 1.2, 1.25])
    (alone,) = judged(runs).differences
    assert (alone.verdict, alone.luck, alone.interval) == ("worse", 0.0, alone.seed_interval)
    narrow, wide = Selection((1.0, 9.0)), Selection((1.0, 1.03, 1.2))
    assert judged(runs, {"a": narrow, "b": narrow}).differences[0].luck == 0.0
    (both,) = judged(runs, {"a": narrow, "b": wide}).differences
    (one,) = judged(runs, {"b": wide}).differences
    (two,) = judged(runs, {"a": wide, "b": wide}).differences
    assert both.luck == one.luck > 0
    assert two.luck == pytest.approx(math.sqrt(2) * one.luck)
    assert both.seed_interval == alone.interval
    assert both.interval is not None
    assert alone.interval is not None
    assert both.interval[0] < alone.interval[0] < alone.interval[1] < both.interval[1]
    flat = Selection((1.0, 1.1, 1.2, 1.3, 1.4))
    noisy = outcomes(a=[1.0, 1.1, 1.2, 1.0, 1.1], b=[1.2, 1.15, 1.55, 1.3, 1.15])
    assert judged(noisy).differences[0].verdict == "worse"
    (lucky,) = judged(noisy, {"a": flat, "b": flat}).differences
    assert (lucky.verdict, lucky.reason.partition(";")[0]) == (
        "no difference shown",
        "so much may be luck of tuning",
    )


def test_luck_grows_with_noise_and_shrinks_with_repetitions() -> None:
    losses = (1.0, 1.05, 1.1, 1.2, 1.4)
    variances = [Selection(losses).variance(deviation) for deviation in (0.0, 0.02, 0.1)]
    assert variances == sorted(variances)
    assert variances[0] == 0.0
    once, often = (Selection(losses, 3, count).variance(0.05) for count in (1, 16))
    assert often < once < Selection(losses).variance(0.05)
    assert Selection((1.0,)).variance(1.0) == Selection(()).variance(1.0) == 0.0
