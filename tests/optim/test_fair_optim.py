"""The fair benchmark: who is tuned where, what is stable, and speed-ups that are known."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modicum.core.errors import InputError
from modicum.optim import FairOptim
from modicum.optim.fair_findings import FairReport
from modicum.optim.fair_optim import FairRuntime
from modicum.optim.fair_search import sensitivities
from modicum.optim.protocol import ProtocolContext, carry_out, protocol_of
from modicum.optim.protocol_trials import ProtocolRegime, ProtocolTrial, TrialResult
from modicum.optim.search_grid import SearchGrid
from modicum.recipe import Recipe

RATIOS = (0.5, 1.0, 2.0, 4.0)
SIZES = (1000, 2000, 4000)
REGIMES = [ProtocolRegime(n, ratio) for n in SIZES for ratio in RATIOS]
SPACE = {
    "rate": SearchGrid((1e-3, 2e-3, 4e-3), 1e-3, "log"),
    "decay": SearchGrid((0.0, 0.1), 0.0, "linear", least=0.0),
}
Train = Callable[[ProtocolTrial], TrialResult]


def noise(trial: ProtocolTrial, size: float) -> float:
    """Of the seed and the data alone, as it is where batches are the same."""
    return random.Random(f"{trial.seed}/{trial.regime}").gauss(0, size)


def train(
    faster: Mapping[str, float] | None = None, *, spread: float = 2e-4, moving: float = 0.0
) -> Train:
    """A side that needs less data; the best rate is 4e-3, less for larger models if it moves."""

    def trained(trial: ProtocolTrial) -> TrialResult:
        more = (faster or {}).get(trial.side, 1.0)
        best = 4e-3 * (trial.regime.parameters / 1000) ** -moving
        worse = 0.2 * math.log(trial.settings["rate"] / best) ** 2
        worse += 0.5 * (trial.settings["decay"] - 0.1) ** 2
        loss = 60 * (more * trial.regime.tokens) ** -0.4 + 1.1 + worse
        return TrialResult(loss + noise(trial, spread))

    return trained


def bound(regimes: list[ProtocolRegime] | None = None, **fields: Any) -> FairRuntime:
    sides = {"plain": SPACE, "other": SPACE}
    return FairOptim(**fields).bind(ProtocolContext(sides, regimes or REGIMES))


def of(report: FairReport, side: str) -> list[float]:
    return [one.speedup.speedup or math.nan for one in report.speedups if one.side == side]


@pytest.mark.expensive
def test_the_reference_over_itself_and_a_planted_speedup() -> None:
    report = carry_out(bound(), train({"other": 1.3}, spread=2e-5))
    assert len(of(report, "plain")) == len(of(report, "other")) == 12
    assert of(report, "plain") == pytest.approx([1.0] * 12, rel=2e-3)
    assert of(report, "other") == pytest.approx([1.3] * 12, rel=0.02)
    assert report.fair
    assert {(row.parameters, row.ratio) for row in report.findings} == {
        (regime.parameters, regime.ratio) for regime in REGIMES
    }


def test_tuning_is_worth_what_the_default_wastes() -> None:
    report = carry_out(bound(), train())
    saved = [one.speedup for one in report.over_default if one.side == "plain"]
    assert len(saved) == 12
    for row, one in zip([r for r in report.findings if r.side == "plain"], saved, strict=True):
        assert row.settings == {"rate": 4e-3, "decay": 0.1}
        default = sum(row.default_losses) / 3
        needed = ((default - 1.1) / 60) ** (-1 / 0.4)
        assert one.speedup == pytest.approx(row.tokens / needed, rel=0.05)


@pytest.mark.expensive
@settings(max_examples=6)
@given(
    spread=st.sampled_from([1e-5, 1e-3, 0.05]), moving=st.sampled_from([0.0, 0.5, 1.0]),
    diverges=st.floats(2e-3, 0.05), seed=st.integers(0, 50),
)  # fmt: skip
def test_no_trial_comes_twice_and_a_state_resumes(
    spread: float, moving: float, diverges: float, seed: int
) -> None:
    plain = train(spread=spread, moving=moving)

    def trained(trial: ProtocolTrial) -> TrialResult:
        return TrialResult(math.nan) if trial.settings["rate"] > diverges else plain(trial)

    complete = bound(REGIMES[:5])
    report = carry_out(complete, trained)
    keys = [trial.key for trial, _ in complete.results]
    assert len(set(keys)) == len(keys)
    judged = [trial for trial, _ in complete.results if trial.part == "judge"]
    assert {trial.seed for trial in judged} == {1, 2, 3}
    stopped, resumed = bound(REGIMES[:5]), bound(REGIMES[:5])
    left = random.Random(seed).randint(0, len(keys) - 1)
    while left:
        for trial in stopped.ask()[:left]:
            stopped.tell(trial, trained(trial).loss)
            left -= 1
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert resumed.ask() == stopped.ask()
    assert carry_out(resumed, trained).to_json() == report.to_json()


def test_full_descent_is_in_the_smallest_size_and_at_ratio_one() -> None:
    runtime = bound()
    full = [(one.parameters, one.ratio) for one in runtime.full]
    assert full == [*((1000, ratio) for ratio in RATIOS), (2000, 1.0), (4000, 1.0)]
    assert len(bound(sweep="all").full) == 12
    first = {(trial.regime.parameters, trial.regime.ratio) for trial in runtime.ask()}
    assert first == set(full)


def test_what_is_stable_is_fixed_and_what_moves_is_swept_and_predicted() -> None:
    runtime = bound()
    report = carry_out(runtime, train(moving=1.0, spread=1e-5))
    for side in ("plain", "other"):
        rate, decay = report.sensitivity[side]
        assert (rate.name, rate.sensitive) == ("rate", True)
        assert (decay.name, decay.stable) == ("decay", (0.1,))
        law = report.laws[side]["rate"]
        assert (law.found, law.predicted) == (1e-3, pytest.approx(1e-3, rel=0.02))
        assert "decay" not in report.laws[side]
    swept = {
        trial.settings["decay"]
        for trial, _ in runtime.results
        if trial.regime == REGIMES[-1] and trial.part == "tune"
    }
    assert swept == {0.1}
    assert [row.settings for row in report.findings if row.parameters == 4000] == (
        [{"rate": 1e-3, "decay": 0.1}] * 8
    )


def test_what_is_stable_depends_on_the_seed_deviation() -> None:
    """A difference of 0.02 nats is something where seeds differ by 0.001, and else nothing."""

    def moves(trial: ProtocolTrial, spread: float) -> TrialResult:
        best = 2e-3 if trial.regime.parameters == 1000 else 4e-3
        worse = 0.0 if trial.settings["rate"] == best else 0.02
        worse += 0.3 * (trial.settings["rate"] not in (2e-3, 4e-3))
        signed = (0.0, -1.0, 0.0, 1.0)[trial.seed] * spread
        return TrialResult(60 * trial.regime.tokens**-0.4 + 1.1 + worse + signed)

    for spread, sensitive in ((0.001, True), (0.05, False)):
        runtime = bound()
        carry_out(runtime, partial(moves, spread=spread))
        rate = sensitivities(runtime.in_full("plain"))[0]
        assert rate.sensitive == sensitive
        assert (4e-3 in rate.stable) != sensitive


def test_few_ratios_have_no_speedup_and_a_curve_that_rises_is_noted() -> None:
    assert carry_out(bound(REGIMES[:3]), train()).speedups == ()

    def rising(trial: ProtocolTrial) -> TrialResult:
        return TrialResult(1 + 1e-6 * trial.regime.tokens + noise(trial, 1e-6))

    report = carry_out(bound(REGIMES[:4]), rising)
    assert report.speedups == ()
    assert any("no curve of plain at 1000 parameters" in note for note in report.notes)


def test_a_side_that_diverges_everywhere_is_reported() -> None:
    plain = train()
    runtime = bound(REGIMES[:4])
    report = carry_out(
        runtime, lambda trial: TrialResult(math.nan) if trial.side == "other" else plain(trial)
    )
    assert of(report, "other") == []
    assert [row.settings for row in report.findings if row.side == "other"] == [None] * 4
    assert any("none of" in note and "other" in note for note in report.notes)
    assert of(report, "plain") == pytest.approx([1.0] * 4, rel=0.01)


def test_one_side_left_at_its_default_is_said_and_seen() -> None:
    fixed = {name: grid.fixed(grid.default) for name, grid in SPACE.items()}
    context = ProtocolContext({"plain": SPACE, "other": fixed}, REGIMES[:4])
    report = carry_out(FairOptim().bind(context), train())
    assert not report.fair
    assert "other was left at its default while plain was tuned" in report.notes
    assert max(of(report, "other")) < 0.8


def test_a_budget_is_the_same_for_all_and_is_noted() -> None:
    runtime = bound(REGIMES[:4], most_settings=3)
    report = carry_out(runtime, train())
    assert {row.tried for row in report.findings} == {3}
    assert any("before all neighbours were tried" in note for note in report.notes)


def test_curves_and_other_figures_are_means_over_the_judges() -> None:
    plain = train()

    def trained(trial: ProtocolTrial) -> TrialResult:
        early = 3.0 if trial.side == "plain" else 2.5
        loss = plain(trial).loss + 0.1 * (trial.side == "other")
        curve = ((0.5, early), (1.0, loss)) if trial.part == "judge" else ()
        return TrialResult(loss, curve, {"seconds": float(trial.seed)})

    report = carry_out(bound(REGIMES[:4]), trained)
    assert {row.metrics["seconds"] for row in report.findings} == {2.0}
    assert [len(one.shares) for one in report.crossings] == [1] * 4
    assert all(0.5 < one.shares[0] < 1 for one in report.crossings)
    json.dumps(report.to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"sides": {"one": SPACE}}, "two sides"),
        ({"regimes": []}, "one regime"),
        ({"regimes": [REGIMES[0], REGIMES[0]]}, "none twice"),
        ({"reference": "plane"}, "Did you mean 'plain'"),
        ({"seed": -1}, "too small"),
    ],
)
def test_what_is_no_comparison_is_refused(fields: dict[str, Any], sentence: str) -> None:
    given = {"sides": {"plain": SPACE, "other": SPACE}, "regimes": REGIMES}
    with pytest.raises(InputError, match=sentence):
        ProtocolContext(**{**given, **fields})


@pytest.mark.parametrize("fields", [{"parameters": 0}, {"ratio": math.inf}, {"ratio": -1.0}])
def test_what_is_no_regime_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="positive finite"):
        ProtocolRegime(**{"parameters": 1000, "ratio": 1.0, **fields})


def test_a_protocol_is_found_by_its_name() -> None:
    assert protocol_of("fair_optim", {"seeds": 5}) == FairOptim(seeds=5)
    with pytest.raises(InputError, match=r"protocol: no such protocol.*Did you mean 'fair_optim'"):
        protocol_of("fair_optm")
    with pytest.raises(InputError, match="no such protocol"):
        protocol_of("adamw")
    with pytest.raises(InputError, match=r"fair_optim\.seeds: too small"):
        protocol_of("fair_optim", {"seeds": 1})


def test_it_is_no_part_of_a_recipe() -> None:
    with pytest.raises(InputError, match=r"optimizer\.method: is a protocol, no part of a recipe"):
        Recipe(optimizer={"method": "fair_optim"})
