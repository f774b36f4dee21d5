"""The benchmark of classes of texts: its tables, and a page that shows no others."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "classify-texts.md"
RESULT = ROOT / "benchmarks" / "results" / "text_classes.json"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("text_classes")


@pytest.fixture
def tables(bench: Any) -> Any:
    return bench.tables


def test_seeds_are_a_mean_with_its_range(tables: Any) -> None:
    def run(*accuracies: float) -> list[dict[str, float]]:
        return [
            {"step": 40 * n, "accuracy": share, "macro_f1": 0.5}
            for n, share in enumerate(accuracies)
        ]

    curves = {"full": [run(0.125, 0.75), run(0.125, 0.5)], "lora": [run(0.1, 0.6), run(0.2, 0.6)]}
    made = tables(curves, {"token_counts": {"C": 1.0, "accuracy": 0.65, "macro_f1": 0.64}})
    assert made["curve"].splitlines()[2:] == [
        "| 0 | 12.5 | 15.0 (10.0 to 20.0) |",
        "| 40 | 62.5 (50.0 to 75.0) | 60.0 |",
    ]
    assert made["end"].splitlines()[2:] == [
        "| full | 62.5 (50.0 to 75.0) | 50.0 |",
        "| LoRA | 60.0 | 50.0 |",
        "| regression on counts of tokens | 65.0 | 64.0 |",
    ]


@pytest.mark.committed
def test_the_page_shows_the_committed_result_or_no_figures(tables: Any) -> None:
    text = PAGE.read_text(encoding="utf-8")
    if not RESULT.exists():
        assert "<!-- table" not in text
        return
    result = json.loads(RESULT.read_text())
    for name, table in tables(result["curves"], result["baselines"]).items():
        assert f"<!-- table: {name} -->\n\n{table}\n\n" in text, table


@pytest.mark.committed
def test_the_picture_has_every_curve_and_stands_in_the_page(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    curves = importlib.import_module("class_curves")
    assert curves.TITLES == bench.TITLES
    drawn, result = curves.picture(), json.loads(RESULT.read_text())
    assert {*result["curves"], *result["baselines"]} == set(bench.TITLES)
    for words in bench.TITLES.values():
        assert f"<!-- {words} -->" in drawn
    shown = curves.shown(PAGE.read_text(encoding="utf-8"))
    assert f"\n\n{curves.SHOWN}\n\n" in shown
    assert "make docs" not in shown
