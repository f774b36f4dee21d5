"""What is decided before a run's first update."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from modicum.core.machine.record import MachineRecord
from modicum.recipe import Recipe
from modicum.trainer import warm_up


def plan(**changes: Any) -> Any:
    """A long plan with a budget, on a CPU."""
    given = {"process_bytes": 600_000_000, "budget": 700_000_000, "seconds": 3600.0}
    return SimpleNamespace(recipe=Recipe(), **given | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"budget": 650_000_000}, "what the compiler holds, 80 MB, does not fit into the budget"),
        ({"budget": None}, None),
        ({"process_bytes": None, "budget": 1}, None),  # an accelerator's budget is of tensors
        ({"budget": 1, "seconds": 60.0}, None),  # too short to be tried at all
    ],
)
def test_a_budget_may_have_no_room_for_the_compiler(
    changes: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = MachineRecord(0, (0.0, 0.0), 1.0, compiled_bytes=80_000_000)
    monkeypatch.setattr(warm_up, "machine_record", lambda: record)
    assert warm_up._opposed(plan(**changes)) == said
