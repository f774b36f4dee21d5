"""The benchmark of comparisons, of few studies."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.expensive


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("compare")


def test_a_large_difference_is_found_and_none_is_not(benchmark: ModuleType) -> None:
    # The landscapes are fixed, so these counts are.
    same = benchmark.counted(4)
    assert same["winners"]["none"] >= 0.75
    different = benchmark.counted(4, 6 * benchmark.DEVIATION)
    assert different["winners"] == {"a": 0.0, "b": 1.0, "none": 0.0}
    # Of five paired differences with half of each variance shared: 2 * 2.78 * s / sqrt(5).
    assert 0.5 < same["interval_in_deviations"]["median"] < 5


def test_sides_that_are_apart_have_their_least_loss_elsewhere(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "DEVIATION", 0.0)

    def best(landscape: object, side: str) -> float:
        rates = [10 ** (-4 + i / 20) for i in range(61)]
        return min(rates, key=lambda rate: landscape(side, {"rate": rate}, 1, "tune").loss)  # type: ignore[operator]

    together, apart = benchmark.Landscape(3), benchmark.Landscape(3, apart=True)
    assert best(together, "a") == best(together, "b")
    assert best(apart, "a") != best(apart, "b")
