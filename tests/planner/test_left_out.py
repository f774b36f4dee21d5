"""The plan says which experts stay as they are, of adapters and of forms of layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from decoders import decoder_folder

from modicum.core.layers.loose_matrices import EXPERTS, MATRIX
from modicum.core.layers.meta import on_meta
from modicum.planner import plan
from modicum.planner.left_out import left_out_by, rows_of_left_out
from modicum.recipe import Recipe
from modicum.tasks import task_of

STAYS = "experts of 2 layers stay as they are, as no form here can hold stacked matrices: "
KINDS = "model.layers.*.mlp.experts.gate_up_proj, model.layers.*.mlp.experts.down_proj"


@pytest.fixture
def recipe(text: Path, tmp_path: Path, tokenizer_folder: Path) -> Recipe:
    """LoRA on a tiny Mixtral in four bits."""
    folder = decoder_folder(tmp_path / "model", "mixtral")
    for file in tokenizer_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return Recipe(
        model={"path": str(folder)},
        data={"path": str(text), "sequence_length": 32},
        training={"batch_size": 4},
        linear={"method": "nf4"},
        adapter={"method": "lora", "rank": 2},
    )


def test_forms_and_compressors_leave_experts_dense(recipe: Recipe) -> None:
    task = task_of(recipe)
    config = task.look(recipe).config
    with on_meta():
        model = task.model(config)
    found = left_out_by(recipe, model)
    assert found.keys() == {"linear"}
    assert sorted(set(found["linear"].values())) == [MATRIX, EXPERTS]
    assert len(found["linear"]) == 6
    [row] = rows_of_left_out(recipe, found)
    assert (row["field"], row["value"]) == ("linear.targets", "all-linear")
    assert row["why"].startswith(f"{STAYS}{KINDS}; left out: ")
    other = recipe.changed(linear=None, adapter=None, compress={"method": "fwsvd", "rank": 2})
    assert left_out_by(other, model) == {"compress": found["linear"]}
    excluding = recipe.changed(linear__exclude=["experts", "gate"])
    assert rows_of_left_out(excluding, left_out_by(excluding, model)) == []


@pytest.mark.expensive
@pytest.mark.filterwarnings("ignore:all-linear leaves out")
def test_a_plan_has_a_row_for_each_section_that_leaves_experts(
    recipe: Recipe, traced_here: list[str]
) -> None:
    row = json.loads(json.dumps(plan(recipe).row()))
    said = {each["field"]: each for each in row["choices"]}
    for field in ("linear.targets", "adapter.targets"):
        assert said[field]["value"] == "all-linear"
        assert said[field]["why"].startswith(f"{STAYS}{KINDS}")
    assert traced_here
