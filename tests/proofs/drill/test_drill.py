"""The composition drill: what it draws, what it finds, and a short form of it."""

from __future__ import annotations

import json
import math
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from modicum.core.errors import FoundWanting, InputError
from modicum.proofs.drill import Case, Drilled, Result, draw, drill, drilling
from modicum.proofs.drill.cases import ALSO, MOST_ROOMS, rooms
from modicum.proofs.drill.compared import differing
from modicum.recipe import SLOTS, Recipe


@cache
def many() -> list[Case]:
    """So many cases that everything is among them, however many methods there are."""
    methods = sum(len(found) for found in rooms().values())
    return [draw(0, number) for number in range(8 * methods)]


def test_a_case_is_a_function_of_its_numbers() -> None:
    assert draw(5, 3) == draw(5, 3)
    assert len({json.dumps(draw(5, number).recipe) for number in range(20)}) == 20


def test_every_room_and_method_is_drawn_sooner_or_later() -> None:
    cases = many()
    seen = Counter(
        value["method"] for case in cases for slot in SLOTS if (value := case.recipe.get(slot))
    )
    assert seen.keys() >= {record.name for found in rooms().values() for record in found}
    assert {len(case.rooms) for case in cases} == set(range(1, MOST_ROOMS + 1))
    assert {case.victim for case in cases} == {0, 1, 2}


def test_adapters_are_drawn_with_copies_with_preparation_and_on_tiles() -> None:
    recipes = [case.recipe for case in many()]
    adapted = [recipe for recipe in recipes if "adapter" in recipe]
    copies = {tuple(recipe["adapter"]["also"]) for recipe in adapted if "also" in recipe["adapter"]}
    assert copies == set(ALSO)
    assert any("also" not in recipe["adapter"] for recipe in adapted)
    known = {record.name: record for record in rooms()["adapters"]}
    prepares = [
        r for r in adapted if "prepares_from_data" in known[r["adapter"]["method"]].info.traits
    ]
    tiled = [r for r in adapted if r.get("linear", {}).get("method") == "tiles"]
    assert prepares
    assert tiled


def test_most_recipes_of_a_method_without_a_rate_are_accepted() -> None:
    (method,) = (m for m in rooms()["optim"] if "takes_no_rate" in m.info.traits)
    optimizers = [(case.recipe.get("optimizer") or {}).get("method") for case in many()]
    drawn = [c.recipe for c, name in zip(many(), optimizers, strict=True) if name == method.name]
    reasons = []
    for recipe in drawn:
        try:
            Recipe(**recipe)
        except InputError as reason:
            reasons.append(str(reason))
    assert len(reasons) < len(drawn) / 2, reasons[:3]


def test_what_is_refused_is_refused_with_a_reason(tmp_path: Path) -> None:
    reasons = []
    for number in range(30):
        values = draw(1, number).with_base(str(tmp_path))
        try:
            Recipe(**values)
        except InputError as reason:
            reasons.append(str(reason))
    assert reasons
    assert all("does not combine with" in reason for reason in reasons)


def test_a_drill_passes_only_with_all_cases_and_enough_accepted() -> None:
    case = draw(0, 0)
    fine, refused = Result(case, peak_ratio=1.0), Result(case, refused="because")
    wrong = Result(case, faults=["the peak"])
    assert Drilled((fine, fine, refused)).passed
    assert not Drilled((fine, refused, refused)).passed
    assert not Drilled((fine, fine, wrong)).passed
    assert Drilled((fine, refused)).accepted_share == 0.5


def test_rows_that_differ_are_found(tmp_path: Path) -> None:
    for name, loss in (("one", 1.0), ("other", 1.5)):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        rows = [{"step": 1, "loss": 2.0, "seconds": loss}, {"step": 2, "loss": loss}]
        for file in ("metrics", "evaluations"):
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (tmp_path / name / f"{file}.jsonl").write_text(text)
    found = differing(tmp_path / "one", tmp_path / "other")
    assert found[0] == "metrics.jsonl differs, from step 2"
    assert any("state" in what for what in found)


@pytest.mark.parametrize(
    ("ran", "exported", "fault"),
    [
        (None, 2.0, "its validation loss is not finite"),
        (2.0, math.nan, "what was exported scores nan, the run 2.000000"),
        (2.0, 2.5, "what was exported scores 2.500000, the run 2.000000"),
        (2.0, 2.0, None),
    ],
)
def test_a_score_that_is_no_number_is_a_fault(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ran: float | None,
    exported: float,
    fault: str | None,
) -> None:
    content = {"peak_bytes": {"measured": 1, "predicted": 1}, "final": {"validation_loss": ran}}
    (tmp_path / "calm").mkdir()
    (tmp_path / "calm" / "run.json").write_text(json.dumps(content))
    monkeypatch.setattr(drilling, "_train", lambda *given, **named: (0, ""))
    monkeypatch.setattr(drilling, "_kill", lambda *given: None)
    monkeypatch.setattr(drilling, "differing", lambda *given: [])
    monkeypatch.setattr(drilling, "exported_score", lambda *given: exported)
    result = Result(draw(0, 0))
    drilling._run(result.case, {"training": {"precision": "fp32"}}, tmp_path, result)
    assert result.faults == ([] if fault is None else [fault])
    assert json.loads(json.dumps(result.as_json(), allow_nan=False))["loss"] == ran


def test_what_does_not_end_in_time_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*given: Any, **named: Any) -> None:
        raise subprocess.TimeoutExpired("train", named["timeout"])

    monkeypatch.setattr("modicum.proofs.drill.drilling.subprocess.run", slow)
    with pytest.raises(FoundWanting, match=r"was not trained.* 124: no end in 1200 s"):
        drill(0, 1, tmp_path / "work")


@pytest.mark.slow
@pytest.mark.ranks
def test_a_short_drill(tmp_path: Path) -> None:
    drilled = drill(20261121, 3, tmp_path / "work")
    assert [(r.case.name, r.faults) for r in drilled.results if not r.passed] == []
    assert all(isinstance(result.case, Case) for result in drilled.results)
