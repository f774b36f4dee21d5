"""The benchmark of DistZO2, of a tiny decoder and one round."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.expensive


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("zeroth_order")


def test_streamed_updates_are_those_on_the_device_and_figures_have_bars(
    benchmark: ModuleType,
) -> None:
    found = benchmark.streaming(benchmark.TINY, 1)
    assert [*found["links"]] == ["0.5", "1", "2"]
    for share, link in found["links"].items():
        assert 2 <= link["blocks_on_the_device"] <= 3
        # Nothing is faster than its link: a transfer of twice the compute takes as long.
        if share == "2":
            assert link["seconds"]["least"] > 0.8 * link["transfer"]
    figures = {"streaming": found, "draws": benchmark.draws(benchmark.TINY, 1)}
    figures["learning"] = [{"what": "gain", "figure": 0.7, "at_least": 0.8}]
    rows = {row["what"]: row for row in benchmark.bars(figures)}
    assert len(rows) == 1 + 2 + 2 * 3
    assert not rows["gain"]["holds"]
    for row in rows.values():
        assert row["holds"] == (row.get("at_least", 0) <= row["figure"] <= row.get("at_most", 99))


def test_an_update_without_forward_passes_draws_four_times(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_point = importlib.import_module("modicum.optim.two_point")
    drawn = []
    monkeypatch.setattr(two_point, "add_", lambda part, *_, **__: drawn.append(part.numel()))
    task = benchmark.Task(benchmark.TINY)
    task.update(two_point.TwoPoint(task.parameters, seed=0), lambda: 0.0)
    assert sum(drawn) == 4 * sum(parameter.numel() for parameter in task.parameters.values())


@pytest.mark.ranks
def test_ranks_take_turns_with_one_alone(benchmark: ModuleType) -> None:
    found = benchmark.ranks(benchmark.TINY, 1)
    assert set(found["over_one"]) == {"points", "rows"}
    assert all(each["count"] == 1 for each in found["seconds"].values())


def test_the_rows_of_two_ranks_are_those_of_one(benchmark: ModuleType) -> None:
    full = benchmark.Task(benchmark.TINY)
    parts = [benchmark.Task(benchmark.TINY, rows) for rows in (slice(0, 2), slice(2, 4))]
    with torch.no_grad():
        halves = [part.loss() / 2 for part in parts]
        assert sum(halves) == pytest.approx(full.loss(), rel=1e-5)
