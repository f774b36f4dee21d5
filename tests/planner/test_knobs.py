"""What may be changed of a recipe to spend less, or more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from modicum.planner.knobs import EXACT, METHOD, ROWS, SHAPE, Knob, loosening, tightening
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
    found = tightening(Recipe(**sections), ranks=2)
    knobs = {knob.field: knob.values for knob in reversed(found)}
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


def test_samples_longer_than_a_row_may_be_shorter() -> None:
    long = Recipe(data={"sequence_length": 128}, samples={"tokens": 1024})
    knobs = {knob.field: knob.values for knob in tightening(long)}
    assert knobs["samples.tokens"] == (512, 256, 128, 64)
    assert "samples.tokens" not in {knob.field for knob in tightening(Recipe())}


def offered(ranks: int = 1, **sections: Any) -> dict[str, list[tuple[int, tuple[Any, ...]]]]:
    """By field the knobs of a recipe that has values to try, as cost and values."""
    found: dict[str, list[tuple[int, tuple[Any, ...]]]] = {}
    for knob in tightening(Recipe(**sections), ranks):
        found.setdefault(knob.field, []).append((knob.cost, knob.values))
    return found


def test_compiled_blocks_can_be_left_as_they_are() -> None:
    assert offered(training={"compile": "blocks"})["training.compile"] == [(EXACT, ("none",))]
    assert "training.compile" not in offered(training={"compile": "auto"})


def test_what_is_trained_next_to_an_adapter_can_be_left_out() -> None:
    adapter = {"method": "lora", "dropout": 0.1, "also": ["*norm*", "lm_head", "*.bias"]}
    found = offered(model={"path": "model"}, adapter=adapter)
    assert found["adapter.also"] == [(METHOD, (["*norm*"], []))]
    assert found["adapter.dropout"] == [(METHOD, (0.0,))]
    without = offered(model={"path": "model"}, adapter={"method": "lora"})
    assert not {"adapter.also", "adapter.dropout"} & without.keys()


def test_numbers_are_tried_smaller_and_larger() -> None:
    found = offered(model={"path": "model"}, compress={"method": "structured_pruning"})
    smaller, larger = (values for _, values in found["compress.neurons"])
    assert smaller == (0.125, 0.0625, 0.03125)
    assert larger == (0.625, 0.8125, 0.9062)
    assert offered(optimizer={"method": "sgd"})["optimizer.momentum"] == [(METHOD, (0.0,))]


def test_a_new_model_can_be_smaller_in_each_of_its_sizes() -> None:
    found = offered(model={"heads": 8, "kv_heads": 4, "mlp_width": 100})
    assert found["model.kv_heads"] == [(SHAPE, (2, 1))]
    assert found["model.mlp_width"] == [(SHAPE, (50, 25, 12, 6))]
    assert found["data.boundaries"] == [(ROWS, (False,))]
    assert "model.mlp_width" not in offered()
    assert not {"model.kv_heads", "model.width"} & offered(model={"path": "model"}).keys()


def test_the_model_of_a_task_can_be_smaller() -> None:
    images = offered(task={"method": "images", "widths": [16, 6]})
    assert images["task.widths"] == [(SHAPE, ([8, 3], [4, 1], [2, 1]))]
    sequences = offered(task={"method": "sequences", "length": 8, "width": 32})
    assert sequences["task.width"] == [(SHAPE, (16, 8, 4, 2))]
    assert sequences["task.length"] == [(ROWS, (4, 2))]
    assert not {"task.widths", "task.images"} & sequences.keys()


def test_buckets_are_of_ranks_that_hold_all_weights() -> None:
    found = offered(2, parallel={"strategy": "ddp", "bucket": 4_000_000})
    assert found["parallel.bucket"] == [(EXACT, (2_000_000, 1_000_000))]
    assert "parallel.bucket" not in offered(2, parallel={"strategy": "fsdp"})
    assert "parallel.bucket" not in offered(1)


def test_a_form_that_is_trained_can_be_dense() -> None:
    assert (METHOD, (None,)) in offered(linear={"method": "low_rank", "share": 0.9})["linear"]
