"""Adapters that build a layer's change or apply factors: the plan chooses, runs keep to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.test_ranks import column, recipe_of, trains

from modicum import Recipe, plan
from modicum.core.ranks.ranks import Ranks
from modicum.planner.explained import PRODUCT, planned_positions
from modicum.trainer.build import wrapped

RANDLORA = {"method": "randlora", "rank": 4}
ADAPTERS = {
    "randlora": RANDLORA,
    "salt": {"method": "salt", "rank": 4},
    "soka": {"method": "soka", "rank": 2},
}


@pytest.fixture(scope="module")
def base(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "run"
    assert trains(Ranks(), recipe_of(questions, training={"steps": 2}), folder) == "done"
    return folder


def values(base: Path, data: Path, adapter: dict[str, Any], **training: Any) -> dict[str, Any]:
    made = recipe_of(data, training={"steps": 6, **training})
    return made | {"model": {"path": str(base)}, "adapter": adapter}


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_plan_says_where_changes_are_built_and_layers_keep_to_it(base, questions, name):
    rows: dict[int, dict[str, Any]] = {}
    for size in (1, 4):
        given = values(base, questions, ADAPTERS[name], micro_batch_size=size)
        made = plan(Recipe.model_validate(given))
        (rows[size],) = (row for row in made.choices if row["field"] == PRODUCT)
        assert planned_positions(made.choices) == made.prediction.positions
        assert f"the {made.prediction.positions:,} positions of a micro-batch" in rows[size]["why"]
        _, adapter = wrapped(made, made.inputs.config)
        assert adapter is not None
        for site, layer in adapter.layers():
            assert layer.positions(torch.empty(7, 3, 2)) == made.prediction.positions
            at = layer.method.built_at(layer.site, layer.planned_positions)
            assert at == made.prediction.built[site]
    assert rows[4]["positions"] == 4 * rows[1]["positions"]


def test_a_product_that_is_told_is_no_choice_of_the_plan(base, questions):
    for adapter in ({**RANDLORA, "product": "built"}, {"method": "lora"}):
        made = plan(Recipe.model_validate(values(base, questions, adapter)))
        assert PRODUCT not in {row["field"] for row in made.choices}
        assert planned_positions(made.choices) is None


def test_a_run_that_resumes_builds_what_its_first_plan_said(base, questions, tmp_path):
    recipe = values(base, questions, RANDLORA, micro_batch_size=4)
    folder = tmp_path / "run"
    assert trains(Ranks(), recipe, folder, stop=(0, 2)).startswith("4: stopped")
    (row,) = (r for r in _choices(folder) if r["field"] == PRODUCT)
    before = column(folder, "loss")
    # As if another version had chosen by other numbers: what the run began with is what counts.
    _rewrite(folder, {**row, "positions": 1})
    assert trains(Ranks(), recipe, folder) == "done"
    assert planned_positions(_choices(folder)) == 1
    assert column(folder, "loss")[: len(before)] == before


def _choices(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "plan.jsonl").read_text().splitlines()
    choices: list[dict[str, Any]] = json.loads(lines[-1])["choices"]
    return choices


def _rewrite(folder: Path, row: dict[str, Any]) -> None:
    file = folder / "plan.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for each in rows:
        each["choices"] = [row if r["field"] == PRODUCT else r for r in each["choices"]]
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
