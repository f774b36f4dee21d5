"""Recipes next to their defaults, and next to each other."""

from __future__ import annotations

from modicum.recipe import Recipe
from modicum.report.recipes import differing, fields


def test_of_a_resolved_recipe_only_what_differs_is_changed() -> None:
    recipe = Recipe(
        model={"path": "base"}, adapter={"method": "lora", "rank": 4}, training={"steps": 7}
    )
    changed = {field.name: field.value for field in fields(recipe.plain()) if field.changed}
    assert changed == {
        "model.path": "base", "adapter.method": "lora", "adapter.rank": 4, "training.steps": 7,
    }  # fmt: skip
    assert not [field for field in fields(Recipe().plain()) if field.changed]


def test_what_nobody_knows_counts_as_changed() -> None:
    names = [f.name for f in fields({"adapter": {"method": "mine", "x": 1}, "new": 2}) if f.changed]
    assert names == ["adapter.method", "adapter.x", "new"]


def test_differences_name_the_field_and_each_value() -> None:
    recipes = [{"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, {"a": None}]
    assert differing(recipes) == [("a.b", [1, 1, None]), ("a.c", [2, 3, None])]
