"""What a question knows of the recipes that are tried on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from classifiers import base_folder, rows, write_rows

from modicum.core.errors import InputError
from modicum.models.config import ModelConfig
from modicum.planner.planning import asked_of
from modicum.recipe import Recipe

SMALL = ModelConfig(vocabulary_size=300, width=32, layers=1, heads=2, context=64)


@pytest.fixture
def classes(tmp_path: Path) -> Recipe:
    """Classes of texts, with an adapter."""
    data = write_rows(tmp_path / "d.jsonl", rows(20))
    return Recipe(
        task={"method": "text_classes"},
        model={"path": str(base_folder(tmp_path / "base", "bert"))},
        data={"path": str(data), "sequence_length": 12, "validation_fraction": 0.2},
        adapter={"method": "lora"},
    )


def test_another_adapter_is_asked_of_the_task_again(classes: Recipe) -> None:
    recipe, asked = classes, asked_of(classes)
    assert asked.config(recipe) == asked.inputs.config
    wider: dict[str, Any] = {"method": "lora", "rank": 16}
    assert asked.config(recipe.changed(adapter=wider)) is asked.config(recipe)
    assert asked.config(recipe.changed(adapter=None)) == asked.inputs.config
    with pytest.raises(InputError, match="LoRA goes with it") as caught:
        asked.config(recipe.changed(adapter={"method": "mos"}))
    assert caught.value.field == "adapter.method"


@pytest.mark.parametrize(("dtype", "form"), [("BF16", None), ("F16", {"method": "fp16"})])
def test_what_the_files_decide_is_settled_anew_for_a_changed_recipe(
    hollow: Callable[..., Path], text: Path, dtype: str, form: dict[str, Any] | None
) -> None:
    recipe = Recipe(
        model={"path": str(hollow(SMALL, dtype))},
        data={"path": str(text), "sequence_length": 32},
        adapter={"method": "lora"},
    )
    asked = asked_of(recipe)
    precision = "bf16" if form is None else "fp32"
    assert (asked.recipe.training.precision, asked.recipe.linear) == (precision, form)
    assert asked.changed({}) == asked.recipe
    full = asked.changed({"adapter": None})
    assert full is not None
    assert (full.training.precision, full.linear) == ("fp32", None)
    said = asked.changed({"training.precision": "fp32"})
    assert said is not None
    assert said.linear is None
    assert asked.changed({"adapter.rank": 0}) is None
    assert asked.changed({"export.dtype": "bfloat16"}) is None  # no adapter is exported so
    comm = {"method": "dense_sums", "dtype": "bf16"}
    chosen = replace(asked, recipe=asked.recipe.changed(comm=comm))
    again = chosen.changed({"data.sequence_length": 16})
    assert again is not None
    assert again.comm == comm


def test_the_files_of_a_classifier_decide_next_to_an_adapter_too(classes: Recipe) -> None:
    asked = asked_of(classes)
    for recipe in (classes, classes.changed(adapter=None)):
        assert asked.task.dtypes_of(asked.inputs, recipe) == asked.inputs.dtypes == {"F32"}


def test_a_change_of_the_exchange_is_made_and_another_leaves_what_was_chosen(
    hollow: Callable[..., Path], text: Path
) -> None:
    recipe = Recipe(
        model={"path": str(hollow(SMALL))},
        data={"path": str(text), "sequence_length": 32},
        comm={"method": "powersgd", "rank": 8},
    )
    asked = asked_of(recipe, ranks=2)
    for change, comm in (
        ({"comm": None}, None),
        ({"comm.rank": 4}, {"method": "powersgd", "rank": 4}),
        ({"training.batch_size": 4}, recipe.comm),
    ):
        made = asked.changed(change)
        assert made is not None
        assert made.comm == comm
