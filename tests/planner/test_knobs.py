"""What may be changed of a recipe to spend less, or more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from modicum.planner.knobs import Knob, loosening, tightening
from modicum.recipe import Recipe

Knobs = Callable[[Recipe], Sequence[Knob]]
ADAPTER = {"method": "lora", "rank": 8, "dropout": 0.1}


def fields(knobs: Knobs, **model: Any) -> tuple[set[str], set[str]]:
    """The fields of the adapter that are offered, and the others."""
    recipe = Recipe(model={"path": "model", **model}, adapter=ADAPTER)
    found = {knob.field for knob in knobs(recipe)}
    own = {field for field in found if field.partition(".")[0] == "adapter"}
    return own, found - own


@pytest.mark.parametrize(
    ("knobs", "new", "kept"),
    [
        (
            lambda recipe: tightening(recipe, layers=["q_proj", "v_proj"]),
            {"adapter", "adapter.method", "adapter.rank", "adapter.targets", "adapter.dropout"},
            {"adapter.dropout"},
        ),
        (loosening, {"adapter", "adapter.rank"}, set()),
    ],
    ids=["tightening", "loosening"],
)
def test_an_adapter_of_a_file_stays_what_the_file_holds(
    knobs: Knobs, new: set[str], kept: set[str]
) -> None:
    begun, others = fields(knobs)
    assert new <= begun
    assert fields(knobs, adapter="adapter") == (kept, others)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, ["int8", "fp16"]),
        ({"bits": 2}, ["nf4", "int8", "fp16"]),
        ({"tile_rows": 1, "tile_columns": 1, "zero_points": "fp32"}, []),
    ],
)
def test_forms_in_more_bytes_than_the_recipe_s_own_with_its_fields(
    fields: dict[str, Any], names: list[str]
) -> None:
    recipe = Recipe(model={"path": "model"}, adapter=ADAPTER, linear={"method": "tiles", **fields})
    knobs = {knob.field: knob.values for knob in loosening(recipe)}
    assert knobs["linear"] == (*({"method": name} for name in names), None)


def test_what_only_adds_bytes_can_be_made_smaller_or_left_out() -> None:
    sections: dict[str, Any] = {
        "comm": {"method": "powersgd", "rank": 8},
        "optimizer": {"method": "sgd"},
    }
    knobs = {knob.field: knob.values for knob in tightening(Recipe(**sections), ranks=2)}
    assert knobs["comm"] == (None,)
    assert knobs["comm.rank"] == (4, 2, 1)
    assert "transform" not in knobs
    assert "comm.method" not in knobs


@pytest.mark.parametrize(("bits", "fewer"), [(4, (3, 2)), (3, (2,))])
def test_of_words_that_are_numbers_smaller_ones_are_tried_the_nearest_first(
    bits: int, fewer: tuple[int, ...]
) -> None:
    recipe = Recipe(
        model={"path": "model"}, adapter=ADAPTER, linear={"method": "tiles", "bits": bits}
    )
    assert {knob.field: knob.values for knob in tightening(recipe)}["linear.bits"] == fewer


def test_ranks_with_whole_weights_may_shard_them() -> None:
    for strategy in ("ddp", "zero"):
        recipe = Recipe(parallel={"strategy": strategy})
        knobs = {knob.field: knob.values for knob in tightening(recipe, ranks=4)}
        assert knobs["parallel.strategy"] == ("fsdp",)
