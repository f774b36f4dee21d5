"""Recipes for models that only transformers has: they are traced, here in this process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from decoders import config_json

from modicum.planner import plan
from modicum.planner.starting import Start, start
from modicum.planner.starting.method import LeastBytes
from modicum.planner.starting.recipe_text import recipe_text
from modicum.recipe import Recipe
from modicum.recipe_yaml import load

pytestmark = pytest.mark.usefixtures("traced_here")
# Weights take far more than activations, so that 4 bits of each make a difference.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64}
_SHARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "bos_token_id", "eos_token_id",
)  # fmt: skip


def model_folder(folder: Path, tokenizer: Path, name: str, **changes: Any) -> str:
    """A config.json and a tokenizer, which are all that a plan reads."""
    shutil.copytree(tokenizer, folder)
    (folder / "config.json").write_text(json.dumps(config_json(name, **changes)))
    return str(folder)


def written(made: Start, file: Path) -> Recipe:
    """The recipe as it is read from the file that is made of it."""
    file.write_text(recipe_text(made.draft.settings.values()))
    return load(file)


@pytest.mark.parametrize("name", ["qwen3", pytest.param("gpt_neox", marks=pytest.mark.expensive)])
def test_a_model_that_only_transformers_has_gets_a_recipe_that_plans(
    name: str, text: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    made = start(model_folder(tmp_path / name, tokenizer_folder, name), str(text))
    assert (made.model["context"], made.model["weights"]) == (64, False)
    assert (made.data["documents"], made.recipe.data.sequence_length) == (40, 64)
    assert made.recipe.adapter is None
    assert "data.boundaries" not in made.draft.settings  # they cost nothing here
    assert made.plan is not None
    assert made.plan.prediction.traced
    recipe = written(made, tmp_path / "made.yaml")
    assert recipe == made.recipe
    assert plan(recipe).prediction.peak_bytes == made.plan.prediction.peak_bytes


@pytest.mark.expensive
def test_a_budget_that_lora_exceeds_is_kept_by_a_4_bit_base(
    text: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    model = model_folder(tmp_path / "qwen3", tokenizer_folder, "qwen3", **WIDE)
    asked: dict[str, Any] = {"training.device": "cpu", "budget.tensors": "4GB"}
    large = start(model, str(text), method="lora", asked=asked)
    assert large.recipe.linear is None
    assert large.plan is not None
    needs = LeastBytes(large.recipe, large.plan.inputs)
    coded = large.recipe.changed(linear={"method": "nf4"}, training__precision="bf16")
    between = (needs(large.recipe) + needs(coded)) // 2
    assert needs(coded) < between
    asked["budget.tensors"] = between - needs.room.base
    made = start(model, str(text), asked=asked)
    assert made.recipe.linear == {"method": "nf4"}
    assert made.recipe.adapter == {"method": "lora", "rank": 8}
    assert made.recipe.training.precision == "bf16"
    why = made.draft.settings["linear.method"].why
    assert "full training needs" in why
    assert "lora needs" in why
    assert made.plan is not None
    assert made.plan.prediction.traced
    again = plan(written(made, tmp_path / "made.yaml"))
    assert again.prediction.peak_bytes <= asked["budget.tensors"]


@pytest.mark.parametrize(
    ("asked", "kept", "why"),
    [
        ({}, True, "one at a time, as this model needs"),
        pytest.param(
            {"parallel.strategy": "fsdp"}, False, "sharded weights", marks=pytest.mark.expensive
        ),
        pytest.param(
            {"data.boundaries": False}, False, "as asked for", marks=pytest.mark.expensive
        ),
    ],
)
def test_what_boundaries_cost_is_said_of_a_model_that_computes_documents_one_at_a_time(
    asked: dict[str, Any],
    kept: bool,
    why: str,
    text: Path,
    tokenizer_folder: Path,
    tmp_path: Path,
) -> None:
    model = model_folder(tmp_path / "bloom", tokenizer_folder, "bloom")
    made = start(model, str(text), asked=asked)
    assert made.recipe.data.boundaries is kept
    assert why in made.draft.settings["data.boundaries"].why
    assert made.plan is not None
    alone = made.plan.inputs.described.endswith("the documents of a row one at a time")
    assert alone is kept  # which a run finds by the same function
    assert written(made, tmp_path / "made.yaml") == made.recipe


@pytest.mark.parametrize(("length", "said"), [(24, False), (25, True)])
def test_what_boundaries_cost_is_said_where_rows_are_longer_than_positions_allow(
    length: int, said: bool, text: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    sizes = {name: value for name, value in config_json("qwen3").items() if name in _SHARED}
    more = {"original_max_position_embeddings": 24, "pad_token_id": None}
    raw = {"model_type": "phi3", **sizes, **more, "rope_scaling": {"type": "longrope", **factors}}
    shutil.copytree(tokenizer_folder, tmp_path / "phi3")
    (tmp_path / "phi3" / "config.json").write_text(json.dumps(raw))
    made = start(str(tmp_path / "phi3"), str(text), asked={"data.sequence_length": length})
    assert ("data.boundaries" in made.draft.settings) is said
    assert made.plan is not None
    assert ("rows of more than 24 tokens" in made.plan.inputs.described) is said
