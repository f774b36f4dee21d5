"""What a question knows of the recipes that are tried on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from classifiers import base_folder, rows, write_rows

from modicum.core.errors import InputError
from modicum.planner.planning import asked_of
from modicum.recipe import Recipe


def test_another_adapter_is_asked_of_the_task_again(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "d.jsonl", rows(20))
    recipe = Recipe(
        task={"method": "text_classes"},
        model={"path": str(base_folder(tmp_path / "base", "bert"))},
        data={"path": str(data), "sequence_length": 12, "validation_fraction": 0.2},
        adapter={"method": "lora"},
    )
    asked = asked_of(recipe)
    assert asked.config(recipe) == asked.inputs.config
    wider: dict[str, Any] = {"method": "lora", "rank": 16}
    assert asked.config(recipe.changed(adapter=wider)) is asked.config(recipe)
    assert asked.config(recipe.changed(adapter=None)) == asked.inputs.config
    with pytest.raises(InputError, match="LoRA goes with it") as caught:
        asked.config(recipe.changed(adapter={"method": "mos"}))
    assert caught.value.field == "adapter.method"
