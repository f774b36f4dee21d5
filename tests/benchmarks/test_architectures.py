"""The page of models: its committed results are complete, and three drawn models still do it."""

from __future__ import annotations

import importlib
import json
import os
import random
from datetime import date
from types import ModuleType
from typing import Any

import pytest
from tests.benchmarks.conftest import ROOT

from modicum.models import traced_cache

DRAWN = 3
# The columns that take seconds, and those that take a minute; the forecast comes with the training.
SHORT = ("train", "resume", "export", "chat", "lora", "merge", "nf4", "nf4_merge", "packing")
LONG = ("train", "compress", "fsdp", "compile")


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


def drawn(bench: ModuleType, request: pytest.FixtureRequest) -> list[str]:
    """This week's models, or those of the seed that was asked for."""
    week = f"{date.today():%G-W%V}"
    seed = request.config.getoption("--sample") or request.config.getoption("--rest-of") or week
    return random.Random(seed).sample(sorted(bench.MODELS), DRAWN)


@pytest.mark.filterwarnings("ignore:all-linear leaves out")  # experts
@pytest.mark.draws
@pytest.mark.parametrize("number", range(DRAWN))
def test_a_drawn_model_does_what_the_page_says(
    number: int, bench: ModuleType, found: Any, request: pytest.FixtureRequest
) -> None:
    name = drawn(bench, request)[number]
    row = bench.model_row(bench.MODELS[name], SHORT)
    before = found["models"][name]
    assert {column: row[column] for column in SHORT} == {c: before[c] for c in SHORT}, name
    assert row["forecast"]["predicted"] == pytest.approx(row["forecast"]["measured"], rel=0.1)


@pytest.mark.filterwarnings("ignore:all-linear leaves out")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler looks
@pytest.mark.expensive
@pytest.mark.draws
def test_a_drawn_model_is_compressed_sharded_and_compiled_as_the_page_says(
    bench: ModuleType, found: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    name = drawn(bench, request)[0]
    row = bench.model_row(bench.MODELS[name], LONG)
    assert {column: row[column] for column in LONG} == {c: found["models"][name][c] for c in LONG}
