"""Runs on a model whose blocks differ: smaller ones, and branches that leave others out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from tests.trainer.test_ranks import DDP, FSDP, column, outcome, recipe_of, trains

from modicum.core.layers.map import remove
from modicum.core.ranks.ranks import Ranks
from modicum.models import load, read_config, save

pytestmark = [pytest.mark.expensive, pytest.mark.ranks]

ZERO = {"strategy": "zero"}
OWN = {"heads": 1, "mlp_width": 80, "mixer_skips": [1], "mlp_skips": [1]}


@pytest.fixture(scope="module")
def base(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that a run has trained, then made smaller and wired as a ladder."""
    folder = tmp_path_factory.mktemp("base")
    values = recipe_of(questions, training={"steps": 2})
    assert trains(Ranks(), values, folder / "run") == "done"
    model = load(folder / "run")
    block = model.layer_map().blocks[1]
    remove(model, block.attentions[0].heads, [1])
    remove(model, block.mlps[0].neurons, range(80, block.mlps[0].neurons.count))
    plan = model.config.forms.with_block("model.layers.0", mlp_skips=[1])
    plan = plan.with_block("model.layers.1", mixer_skips=[1], mlp_skips=[1])
    model.config = replace(model.config, forms=plan)
    return save(model, folder / "model", files=(folder / "run" / "tokenizer").glob("*"))


def values(data: Path, base: Path, **sections: Any) -> dict[str, Any]:
    made = recipe_of(data, **sections)
    return made | {"model": {"path": str(base)}}


@pytest.fixture(scope="module")
def alone(base: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert trains(Ranks(), values(questions, base), folder) == "done"
    return folder


def test_a_run_keeps_the_plan_and_its_forecast(alone: Path) -> None:
    assert read_config(alone / "model").forms.block("model.layers.1").as_json() == OWN
    losses = column(alone, "loss", "evaluations")
    assert losses[-1] < losses[0] - 0.1
    peak = json.loads((alone / "run.json").read_text())["peak_bytes"]
    assert peak["predicted"] == pytest.approx(peak["measured"], rel=0.15)


def test_killed_it_resumes_to_the_bit(
    alone: Path, base: Path, questions: Path, tmp_path: Path
) -> None:
    made = values(questions, base)
    assert trains(Ranks(), made, tmp_path / "run", (0, 7)).startswith("4: stopped")
    assert trains(Ranks(), made, tmp_path / "run") == "done"
    assert outcome(tmp_path / "run") == outcome(alone)


@pytest.mark.parametrize("parallel", [DDP, FSDP, ZERO], ids=lambda each: each["strategy"])
def test_losses_of_two_ranks_are_those_of_one_process(
    pool: Pool,
    alone: Path,
    base: Path,
    questions: Path,
    tmp_path: Path,
    parallel: dict[str, Any],
) -> None:
    made = values(questions, base, parallel=parallel)
    ended = pool.run(trains, made, tmp_path / "run", (1, 6), ranks=2)
    assert all(each.startswith("4: ") for each in ended)
    assert pool.run(trains, made, tmp_path / "run", ranks=2) == ["done"] * 2
    assert column(tmp_path / "run", "loss") == pytest.approx(column(alone, "loss"), rel=1e-4)
    assert read_config(tmp_path / "run" / "model") == read_config(alone / "model")


def test_adapters_on_a_quantized_base_of_it(
    alone: Path, base: Path, questions: Path, tmp_path: Path
) -> None:
    made = values(questions, base, adapter={"method": "lora", "rank": 2}, linear={"method": "nf4"})
    assert trains(Ranks(), made, tmp_path / "run") == "done"
    assert column(tmp_path / "run", "loss")[-1] < column(tmp_path / "run", "loss")[0]
