"""The benchmark of `comm: auto`: what it is held against; measured links stay as they are."""

from __future__ import annotations

import importlib
import json
import os
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
from tests.benchmarks.conftest import ROOT

from modicum.core.machine.links import MeasuredLink, keep_links, known_links
from modicum.recipe import Recipe


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("comm_auto")


def row(step: float, loss: float = 2.0, forecast: float | None = None) -> dict[str, Any]:
    times = [step, 9 * step, step]
    said = {"forecast": forecast, "chosen": None, "bytes": 900.0, "ring_steps": 4}
    return {"seconds": times, "loss": loss, **said}


def test_auto_is_held_against_the_best_single_exchange(bench) -> None:
    rows = {"plain": row(2.0), "dear": row(1.5), "acp_sgd": row(1.0), "auto": row(1.05, 2.01, 1.2)}
    link = {"rate": 1000.0, "latency": 0.01}
    found = bench.judged(rows, 0.3, link)
    assert found["over_bound"] == pytest.approx(1.05 / 0.94)
    assert bench.judged(rows, 1.05, link)["over_bound"] == 1.0
    assert found["best"] == "acp_sgd"
    assert found["over_best"] == pytest.approx(1.05)
    assert found["forecast_off"] == {"auto": pytest.approx(1.2 / 1.05 - 1)}
    assert found["within"] == {"over_best": True, "forecast": True, "loss": True}
    rows["auto"] = row(1.2, 2.1, None)
    within = bench.judged(rows, 0.3, link)["within"]
    assert within == {"over_best": False, "forecast": False, "loss": False}


def test_auto_lists_what_changes_numbers_and_single_ones_are_its_choices(bench, tmp_path) -> None:
    recipes = importlib.import_module("comm_recipes")
    made = bench.ways(recipes.recipes_of(tmp_path, 4, recipes.QUICK_RUN))
    assert made["plain"]["comm"] is None
    listed = Recipe(**made["auto"]).comm["among"]
    assert [way["method"] for way in listed] == ["dense_sums", "powersgd", "acp_sgd"]
    singles = [made[label]["comm"] for label in made if label not in ("plain", "auto", "dear")]
    assert [way["method"] for way in singles] == [way["method"] for way in listed]


def test_links_that_are_known_stay_as_they_are(bench, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    known = MeasuredLink(0.25, 1e6, 0.0, 2, "now")
    keep_links({"local": known})
    with bench.own_cache():
        assert known_links() == {}
        keep_links({"local": MeasuredLink(0.5, 1e3, 0.0, 2, "later")})
    assert known_links() == {"local": known}
    assert os.environ["XDG_CACHE_HOME"] == str(tmp_path)


def test_a_ratio_that_is_measured_again_stands_among_the_others(
    bench, tmp_path, monkeypatch
) -> None:
    passes = dict.fromkeys(("over_best", "forecast", "loss"), True)
    before = {ratio: {"within": passes, "when": "before"} for ratio in ("1", "3", "10")}
    (tmp_path / "comm_auto.json").write_text(json.dumps({"ratios": before}))
    written: list[dict[str, Any]] = []
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setattr(bench, "alone", nullcontext)
    monkeypatch.setattr(bench, "write_result", lambda _, figures, __: written.append(figures))
    again = {"within": passes | {"loss": False}, "when": "again"}
    monkeypatch.setattr(
        bench, "measured", lambda _, __, ratios, *___: iter([{f"{ratios[0]:g}": again}])
    )
    monkeypatch.setattr("sys.argv", ["comm_auto.py", "--ratios", "3"])
    bench.main()
    [figures] = written
    assert [row["when"] for row in figures["ratios"].values()] == ["before", "again", "before"]
    assert figures["within"] == passes | {"loss": False}
    assert figures["complete"]
