"""The plan says on which layers another method is than the recipe's adapter."""

from __future__ import annotations

import pytest

from modicum.core.errors import InputError
from modicum.models.config import ModelConfig
from modicum.planner import plan
from modicum.planner.adapted_otherwise import INSTEAD
from modicum.recipe import Recipe

ODD = ModelConfig(vocabulary_size=512, width=32, layers=2, heads=4, mlp_width=81, context=64)


def test_layers_with_something_else_are_a_row(hollow, text):
    recipe = Recipe(
        model={"path": str(hollow(ODD))},
        data={"path": str(text), "sequence_length": 32},
        training={"batch_size": 4},
        adapter={"method": "q_bara", "rank": 2},
    )
    [row] = [row for row in plan(recipe).choices if row["field"] == INSTEAD]
    assert row["value"] == "6 of 14 layers"
    one, other = row["why"].split("; ")
    assert one == (
        "LoRA, as pooling (2) does not divide 32 x 81: model.layers.0.mlp.gate_proj, "
        "model.layers.0.mlp.up_proj, model.layers.1.mlp.gate_proj, model.layers.1.mlp.up_proj"
    )
    assert other.startswith("LoRA, as pooling (2) does not divide 81 x 32: model.layers.0.mlp.down")
    for fields in ({"method": "q_bara", "pooling": 1}, {"method": "lora", "rank": 2}):
        choices = plan(recipe.changed(adapter=fields)).choices
        assert INSTEAD not in [row["field"] for row in choices]


def test_narrow_layers_are_a_row_and_a_rank_for_few_is_refused(hollow, text):
    config = ModelConfig(
        vocabulary_size=512, width=32, layers=2, heads=4, kv_heads=1, mlp_width=80,
        context=64,
    )  # fmt: skip
    recipe = Recipe(
        model={"path": str(hollow(config))},
        data={"path": str(text), "sequence_length": 32},
        training={"batch_size": 4},
        adapter={"method": "lora", "rank": 9},
    )
    [row] = [row for row in plan(recipe).choices if row["field"] == "adapter.rank"]
    assert row["value"] == 9
    assert row["why"].startswith("above the smaller width of model.layers.0.self_attn.k_proj (32 x")
    assert row["why"].endswith("and 1 more, where rank 8 is enough")
    assert "adapter.rank" not in [
        row["field"] for row in plan(recipe.changed(adapter__rank=8)).choices
    ]
    with pytest.raises(InputError, match=r"adapter\.rank: above .* fits is 8 \(found: 33\)"):
        plan(recipe.changed(adapter__rank=33))
