"""The page of a comparison: its figures are those of compare.json, and it opens offline."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from modicum.comparison.outcome import Outcome
from modicum.comparison.space import Side
from modicum.comparison.spaces import TunedRange
from modicum.comparison.study import Study
from modicum.core.contracts.search_ranges import FieldBounds, LogRange
from modicum.core.errors import InputError
from modicum.report.compared import crossings, pareto, render_compared, write_compared

MEANS = {"adamw": 2.0, "li<on": 2.4, "sgd": 3.0}


def trial(side: str, settings: Any, seed: int, part: str) -> Outcome:
    """A loss with its least at a rate of 1e-3; SGD diverges above 1e-2."""
    rate = settings["training.learning_rate"]
    if side == "sgd" and rate > 1e-2:
        return Outcome("diverged", message="training diverged")
    loss = MEANS[side] + abs(rate - 1e-3) + 0.01 * (seed % 3)
    state = {"adamw": 200, "li<on": 100, "sgd": 100}[side]
    test = {"test_loss": loss + 0.5} if part == "judge" else {}
    return Outcome("finished", loss, test, {}, 1000, 3.0, {"peak": 10 * state, "state": state})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("comparison")
    rate = TunedRange(LogRange(1e-4, 1e-1, 1e-3), FieldBounds(0.0))
    sides = [Side(name, {"training.learning_rate": rate}, {"recipe": name}) for name in MEANS]
    sides.append(Side("frugal", refusal="it does not combine with adapters"))
    recipes = {name: {"optimizer": {"method": name}} for name in MEANS}
    given = {"recipes": recipes, "budget": "1,000 tokens", "references": ["sgd"],
             "unequal": {"sgd": "has 100 B, not 200 B"}}  # fmt: skip
    Study(made, sides, trial, trials=6, seeds=5, sampler="grid", given=given, journal=False).run()
    (made / "best.yaml").write_text("optimizer: {method: adamw}\n")
    return made


def test_the_page_has_the_figures_and_the_reasons(folder: Path) -> None:
    page = render_compared(folder)
    found = json.loads((folder / "compare.json").read_text())
    for standing in found["judgement"]["standings"]:
        if standing["mean"] is not None:
            assert f"{standing['mean']:.4f}" in page
    assert "adamw is better than every other side" in page
    assert "it does not combine with adapters" in page
    assert "took the same rows in the same order" in page
    assert "diverged" in page or "×" in page
    assert page.count("not at the budget: it has 100 B, not 200 B") == 1
    assert "li&lt;on" in page
    assert "li<on" not in page
    assert "optimizer: {method: adamw}" in page


def test_the_page_fetches_and_runs_nothing(folder: Path) -> None:
    page = render_compared(folder)
    assert not re.findall(r"(?:src|href)=[\"']?(?:https?:)?//", page)
    assert "script-src 'none'" in html.unescape(page)
    assert "<script>" not in page


def test_it_is_written_again_and_no_other_file_is_replaced(folder: Path) -> None:
    target = write_compared(folder)
    assert write_compared(folder).read_text() == target.read_text()
    target.write_text("mine")
    with pytest.raises(InputError):
        write_compared(folder)
    assert target.read_text() == "mine"


def test_a_folder_without_a_result_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no finished comparison"):
        write_compared(tmp_path)


def test_only_what_nothing_beats_is_on_the_front() -> None:
    points = {"a": (1.0, 3.0), "b": (2.0, 2.0), "c": (2.0, 2.5), "d": (3.0, 1.0), "e": (1.0, 3.0)}
    assert pareto(points) == ["a", "b", "d", "e"]


def test_the_last_crossing_counts() -> None:
    a = [(1.0, 3.0), (2.0, 2.0), (3.0, 1.9), (4.0, 1.0)]
    b = [(1.0, 2.5), (2.0, 2.2), (3.0, 1.8), (4.0, 1.7)]
    last = {"of": "a", "below": "b", "tokens": 4.0, "loss": 1.0}
    assert crossings({"a": a, "b": b}) == [last]
    assert crossings({"b": b, "a": a}) == [last]
    assert crossings({"a": a, "b": [(t, loss + 9) for t, loss in a]}) == []


def test_sides_of_unequal_updates_cross_where_their_tokens_are_equal() -> None:
    # On tokens a falls from 4 to 2, b stays at 3: they meet at 200, whatever the points are.
    fine = [(10.0 * n, 4.0 - 0.005 * (10.0 * n)) for n in range(1, 41)]
    coarse = [(130.0 * n, 3.0) for n in range(1, 6)]
    [found] = crossings({"a": fine, "b": coarse})
    assert (found["of"], found["below"]) == ("a", "b")
    assert found["tokens"] == 210.0
    assert found["loss"] == pytest.approx(2.95)
    assert crossings({"a": fine[:5], "b": coarse}) == []  # no tokens that both have
    assert crossings({"a": [], "b": coarse}) == []


def test_a_crossing_is_marked_on_the_curves(tmp_path: Path) -> None:
    def curve(side: str, settings: Any, seed: int, part: str) -> Outcome:
        run = tmp_path / "runs" / f"{side}-{part}-{seed}"
        run.mkdir(parents=True)
        steps = range(1, 301)
        slope = {"fast": 0.01, "slow": 0.02}[side]
        start = {"fast": 3.0, "slow": 4.0}[side]
        rows = ({"step": n, "loss": start - slope * n, "tokens": 10, "seconds": 0.1} for n in steps)
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return Outcome("finished", start - slope * 300 + 0.01 * seed, folder=str(run))

    sides = [Side(name, {}, {"name": name}) for name in ("fast", "slow")]
    Study(tmp_path, sides, curve, trials=1, seeds=2, sampler="grid", journal=False).run()
    page = render_compared(tmp_path)
    assert page.count('class="mark"') == 1
    assert len(re.findall(r"slow falls below fast after 1\.\d+ k tokens", page)) == 2
