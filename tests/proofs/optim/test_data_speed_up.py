"""Data speed-ups from curves whose answer is known."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.core.contracts.catalog import catalog
from modicum.optim import NAdamW
from modicum.proofs.base import ProofRun
from modicum.proofs.optim.data_speed_up import (
    BUDGETS,
    QUICK,
    QUICK_BUDGETS,
    AgainstAdamW,
    equivalent_data,
    interval,
)
from modicum.proofs.optim.text_bench import Plain, Text, TextArm, TextResult


@given(st.floats(0.3, 8.0), st.floats(0.05, 0.5))
def test_a_known_speed_up_is_recovered_within_and_beyond_the_curve(
    speed_up: float, power: float
) -> None:
    curve = {budget: 3.0 * budget**-power for budget in BUDGETS}
    assert equivalent_data(3.0 * speed_up**-power, curve) == pytest.approx(speed_up, rel=1e-6)


def test_with_a_floor_of_the_loss_it_is_within_three_percent_between_budgets() -> None:
    def loss(data: float) -> float:
        return 1.5 + 1.0 * data**-0.3

    curve = {budget: loss(budget) for budget in BUDGETS}
    for speed_up in (0.7, 1.0, 1.3, 3.0):
        assert equivalent_data(loss(speed_up), curve) == pytest.approx(speed_up, rel=0.03)


def test_a_curve_that_does_not_fall_says_nothing_and_divergence_is_no_data() -> None:
    assert equivalent_data(1.0, {1.0: 2.0, 2.0: 2.0}) == math.inf
    assert equivalent_data(math.nan, {1.0: 2.0, 2.0: 1.0}) == 0.0


def test_an_interval_is_students() -> None:
    low, mean, high = interval([math.exp(each) for each in (0.0, 0.1, 0.2)])
    # t of two degrees of freedom is 4.303, and the standard error 0.1 / sqrt 3.
    assert math.log(mean) == pytest.approx(0.1)
    assert math.log(high) == pytest.approx(0.1 + 4.303 * 0.1 / math.sqrt(3))
    assert math.log(low) == pytest.approx(0.1 - 4.303 * 0.1 / math.sqrt(3))
    assert interval([1.2]) == (0.0, pytest.approx(1.2), math.inf)
    assert interval([1.0, 1.0, 1.0]) == (1.0, 1.0, 1.0)


def test_quick_curves_of_adamw_are_trained_once_and_tuned_at_one_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trained: list[tuple[int, float, int]] = []

    def train(text: Text, arm: TextArm, rate: float) -> TextResult:
        trained.append((text.size.steps, rate, text.seed))
        better = 1.2 if isinstance(arm, Plain) and arm.method == NAdamW.value() else 1.0
        off = 0.01 * abs(math.log2(rate / 2e-3))
        return TextResult(3.0 * (better * text.size.steps) ** -0.1 + off + 1e-3 * text.seed, 0)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # invented losses are kept nowhere else
    monkeypatch.setattr(Text, "train", train)
    bench = AgainstAdamW(ProofRun(catalog()["nadamw"], null=False, full=False))
    arms = [("NAdamW", Plain(NAdamW.value()), (1e-3, 2e-3, 4e-3))]
    found = bench.speed_up("NAdamW", arms, claimed="")
    assert found.mean == pytest.approx(1.2, rel=0.02)
    rates = [*[1e-3, 2e-3, 4e-3], 2e-3, 2e-3]  # the first seed's, and the other seeds'
    one = [(QUICK.steps, rate, seed) for rate, seed in zip(rates, (0, 0, 0, 1, 2), strict=True)]
    others = [round(QUICK.steps * budget) for budget in QUICK_BUDGETS if budget != 1]
    curve = one + [(steps, 2e-3, seed) for steps in others for seed in (0, 1, 2)]
    assert sorted(trained) == sorted(curve + one)
    assert (tmp_path / "modicum" / "trials").is_dir()
    bench.speed_up("again", arms, claimed="")
    assert len(trained) == len(curve) + 2 * len(one)
