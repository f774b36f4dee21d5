"""What a plan says of an optimizer's rank and gap, and what it refuses before the first update."""

from __future__ import annotations

from typing import Any

import pytest

from modicum import Recipe, plan
from modicum.core.errors import InputError


def recipe(text: Any, optimizer: dict[str, Any], **training: Any) -> Recipe:
    return Recipe(
        model={"layers": 2, "width": 32, "heads": 4, "kv_heads": 1, "vocabulary_size": 300},
        data={"path": str(text), "sequence_length": 32},
        training={"batch_size": 4, "steps": 50, **training},
        optimizer=optimizer,
    )


def said(made: Recipe) -> dict[str, str]:
    return {row["field"]: row["why"] for row in plan(made).choices}


def test_a_rank_above_some_widths_is_a_row_and_above_all_is_refused(text):
    for name in ("galore", "dct_adamw", "trion"):
        found = said(recipe(text, {"method": name, "rank": 9}))
        assert found["optimizer.rank"].startswith("above the smaller width of model.layers.0.self_")
        assert found["optimizer.rank"].endswith("rank 8 fits all")
        assert "optimizer.rank" not in said(recipe(text, {"method": name, "rank": 8}))
        with pytest.raises(InputError, match=r"optimizer\.rank: above .* fits one is 32 \(found"):
            plan(recipe(text, {"method": name, "rank": 33}))
    # The default is reduced to what fits, also where a run's record spells it out.
    assert "above the smaller width" in said(recipe(text, {"method": "galore"}))["optimizer.rank"]
    assert "optimizer.rank" in said(recipe(text, {"method": "galore", "rank": 128}))


def test_a_part_that_never_changes_is_a_row(text):
    frugal = {"method": "frugal", "density": 0.5}
    assert "50 updates" in said(recipe(text, {**frugal, "update_gap": 50}))["optimizer.update_gap"]
    assert "optimizer.update_gap" not in said(recipe(text, {**frugal, "update_gap": 49}))
    assert "optimizer.update_gap" not in said(recipe(text, {"method": "frugal", "density": 1.0}))


def test_what_is_found_once_and_kept_is_a_row(text):
    first = {"galore": "update_gap", "dct_adamw": "update_gap", "soap": "frequency"}
    for name, field in first.items():
        method = {"method": name} | ({"rank": 8} if field == "update_gap" else {})
        found = said(recipe(text, {**method, field: 50}))[f"optimizer.{field}"]
        assert found.startswith("the run has 50 updates, so ")
        assert f"optimizer.{field}" not in said(recipe(text, {**method, field: 49}))
    made = recipe(text, {"method": "adamw"}).changed(transform={"method": "mkor", "every": 50})
    assert "the first update" in said(made)["transform.every"]


def test_components_that_are_never_pruned_are_a_row(text):
    made = recipe(text, {"method": "adamw"})
    pruning = {"method": "maestro", "threshold": 0.1}
    found = said(made.changed(linear={**pruning, "every": 50}))["linear.every"]
    assert found == "the run has 50 updates, so no component is pruned before its end"
    for fields in ({"every": 49}, {"every": 50, "threshold": 0.0}, {"method": "low_rank"}):
        given = {"method": "low_rank"} if "method" in fields else {**pruning, **fields}
        assert "linear.every" not in said(made.changed(linear=given))
    # Without a number it is each epoch's end.
    for steps in (1, 5000):
        short = recipe(text, {"method": "adamw"}, steps=steps).changed(linear=pruning)
        epochs = plan(short).epochs
        assert epochs is not None
        assert (epochs < 1) == (steps == 1) == ("linear.every" in said(short))


def test_a_form_that_is_larger_than_dense_weights_is_a_row(text):
    made = recipe(text, {"method": "adamw"})
    found = said(made.changed(linear={"method": "sst", "rank": 4}))["linear.method"]
    assert found.startswith("up to 2.03 times the bytes of dense weights, in model.layers.0.self_")
    assert found.endswith("layers that are larger at the run's end are exported dense alone")
    found = said(made.changed(linear={"method": "maestro"}))["linear.method"]
    assert found.startswith("at first up to 2 times the bytes")
    for small in ({"method": "low_rank"}, {"method": "maestro", "rank": 6}, {"method": "lost"}):
        assert "linear.method" not in said(made.changed(linear=small))


def test_a_density_of_no_matrix_is_refused(text):
    with pytest.raises(InputError, match="less than half of one; take 0, or more"):
        plan(recipe(text, {"method": "frugal", "density": 0.01}))


@pytest.mark.parametrize(
    ("part", "thin", "none"),
    [
        ("columns", 0.015, 0.004),
        ("rows", 0.04, 0.004),
        ("svd", 0.04, 0.01),
        ("entries", 1e-3, 1e-5),
    ],
)
def test_a_density_that_rounds_to_nothing_is_a_row_or_refused(text, part, thin, none):
    found = said(recipe(text, {"method": "frugal", "part": part, "density": thin}))
    assert found["optimizer.density"].startswith("less than half of one of ")
    assert found["optimizer.density"].endswith("; one is taken")
    with pytest.raises(InputError, match=r"density: less than half of one of \d+, which"):
        plan(recipe(text, {"method": "frugal", "part": part, "density": none}))


def test_a_rate_means_nothing_to_a_method_without_one_be_it_the_default():
    fields: dict[str, Any] = {
        "task": {"method": "sequences", "sequences": 96, "held_out": 16},
        "optimizer": {"method": "admm_rnn"},
    }
    training = {"schedule": "constant", "clip_norm": None}
    made = Recipe(**fields, training=training)
    assert "learning_rate" not in made.plain()["training"]
    assert Recipe(**made.plain()) == made
    with pytest.raises(InputError, match=r"have no learning rate; leave training\.learning_rate"):
        Recipe(**fields, training={**training, "learning_rate": 1e-3})
