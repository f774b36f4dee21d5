"""The page of models: its committed results are complete, and three drawn models still do it."""

from __future__ import annotations

import importlib
import json
import random
from datetime import date
from types import ModuleType
from typing import Any

import pytest
from tests.benchmarks.conftest import ROOT

from modicum.models import traced_cache

DRAWN = 3
# Not compression, ranks and compiled blocks, which take longer: other tests train a model or two
# so (tests/trainer/test_transformers_runs.py). The forecast comes with the training.
HERE = ("train", "resume", "export", "chat", "lora", "merge", "nf4")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    made = importlib.import_module("architectures")
    monkeypatch.setattr(traced_cache, "_traced_apart", made.trace_here)
    return made


@pytest.fixture
def found() -> dict[str, Any]:
    text = (ROOT / "benchmarks" / "results" / "architectures.json").read_text(encoding="utf-8")
    read: dict[str, Any] = json.loads(text)
    return read


@pytest.mark.committed
def test_every_model_was_run_through_every_column(bench: ModuleType, found: Any) -> None:
    assert list(found["models"]) == list(bench.MODELS)
    for name, row in found["models"].items():
        assert row["model_type"] == bench.MODELS[name]["model_type"]
        said = {row[column].partition(":")[0] for column in bench.COLUMNS}
        assert said <= {"seen", "refused"}, name
        assert row["forecast"]["predicted"] == pytest.approx(row["forecast"]["measured"], rel=0.1)
    assert bench.ordered(found)["counts"] == found["counts"]
    assert set(found["large"]) == set(bench.LARGE)
    for row in found["large"].values():
        assert row["measured"] >= 2e8
        assert row["predicted"] == pytest.approx(row["measured"], rel=0.1)


@pytest.mark.committed
def test_the_page_shows_what_was_seen(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(ROOT / "docs")
    page = importlib.import_module("generate").models_page()
    [heads] = [line for line in page.splitlines() if line.startswith("| model | `model_type`")]
    for name, row in found["models"].items():
        [line] = [each for each in page.splitlines() if each.startswith(f"| {name} | `")]
        assert line.count("|") == heads.count("|")
        assert line.count("✓") == sum(cell == "seen" for cell in row.values())
        for words in row.values():
            assert not str(words).startswith("refused") or words in page


@pytest.mark.filterwarnings("ignore:all-linear leaves out")  # experts
@pytest.mark.draws
@pytest.mark.parametrize("number", range(DRAWN))
def test_a_drawn_model_does_what_the_page_says(
    number: int, bench: ModuleType, found: Any, request: pytest.FixtureRequest
) -> None:
    week = f"{date.today():%G-W%V}"
    seed = request.config.getoption("--sample") or request.config.getoption("--rest-of") or week
    name = random.Random(seed).sample(sorted(bench.MODELS), DRAWN)[number]
    row = bench.model_row(bench.MODELS[name], HERE)
    before = found["models"][name]
    assert {column: row[column] for column in HERE} == {c: before[c] for c in HERE}, name
    assert row["forecast"]["predicted"] == pytest.approx(row["forecast"]["measured"], rel=0.1)
