"""What is decided before a run's first update."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from modicum.core.machine.record import MachineRecord, ProbeFailed
from modicum.core.ranks.ranks import Ranks
from modicum.planner import plan as planned
from modicum.recipe import Recipe
from modicum.trainer import warm_up


def plan(**changes: Any) -> Any:
    """A long plan with a budget, on a CPU; it leaves 56 MB free, as all budgets do."""
    eager = changes.pop("eager", None)
    given = {"process_bytes": 600_000_000, "process_base": 400_000_000, "seconds": 3600.0}
    budget = {"memory": changes.pop("budget", 740_000_000)}
    task = SimpleNamespace(why_eager=lambda recipe, inputs: eager)
    return SimpleNamespace(recipe=Recipe(budget=budget), task=task, inputs=None, **given | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"budget": 730_000_000}, "what the compiler holds, 80 MB, does not fit into the budget"),
        ({"budget": None}, None),
        ({"budget": None, "eager": "documents are computed one at a time"}, "one at a time"),
        ({"process_bytes": None}, None),  # an accelerator's budget is of tensors
        ({"budget": 610_000_000, "seconds": 60.0}, None),  # too short to be tried at all
    ],
)
def test_a_budget_may_have_no_room_for_the_compiler(
    changes: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = MachineRecord(0, (0.0, 0.0), 1.0, compiled_bytes=80_000_000)
    monkeypatch.setattr(warm_up, "machine_record", lambda: record)
    found = warm_up._opposed(plan(**changes))
    assert found is said is None or (said is not None and said in str(found))


def test_where_it_cannot_be_measured_a_run_with_a_budget_does_not_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails() -> NoReturn:
        raise ProbeFailed("this machine could not be measured")

    monkeypatch.setattr(warm_up, "machine_record", fails)
    assert "could not be measured" in str(warm_up._opposed(plan()))
    assert warm_up._opposed(plan(budget=None)) is None


@pytest.mark.parametrize(
    ("asked", "value", "more"),
    [("auto", "blocks", 80), ("auto", "none", 0), ("blocks", "blocks", 0), ("blocks", "none", -80)],
)
def test_a_process_is_forecast_with_what_the_compiler_holds_where_it_is_used(
    asked: str, value: str, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = MachineRecord(0, (0.0, 0.0), 1.0, compiled_bytes=80)
    monkeypatch.setattr(warm_up, "machine_record", lambda: record)
    made = planned(Recipe(training={"compile": asked, "steps": 1, "device": "cpu"}))
    decided = warm_up._counted(made.chosen("training.compile", value, "so it is"), Ranks())
    assert decided.process_base - made.process_base == more
