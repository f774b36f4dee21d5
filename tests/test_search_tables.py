"""The search tables of the catalog: what they name is in recipes, and what they hold is taken."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from modicum.core.contracts.catalog import MethodRecord, catalog
from modicum.core.contracts.optimizers import OptimizerMethod
from modicum.core.contracts.search import LogRange, SearchChoice
from modicum.core.contracts.search_check import RECIPE_FIELDS, field_bounds
from modicum.core.errors import InputError
from modicum.recipe import SLOTS, Recipe, TrainingSection, recipe_path
from modicum.recipe.searched import RECIPE_PATHS, search_json
from modicum.recipe.slots import slot_of

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
RECORDS = list(catalog().values())
WITH_FIELDS = [record for record in RECORDS if record.own_search is not None]


def test_names_of_the_recipe_mean_fields_that_are_there() -> None:
    assert set(RECIPE_PATHS) == set(RECIPE_FIELDS)
    bounds = {name: field_bounds(kind) for name, kind in RECIPE_FIELDS.items()}
    for name, path in RECIPE_PATHS.items():
        section, _, field = path.partition(".")
        if section == "training":
            known = TrainingSection.model_fields[field].rebuild_annotation()
            assert field_bounds(known) == bounds[name], name
    for record in RECORDS:
        if slot_of(record) == "optimizer" and "takes_no_rate" not in record.info.traits:
            assert field_bounds(record.fields["weight_decay"][0]) == bounds["weight_decay"]


def test_paths() -> None:
    assert recipe_path("adapter", "rank") == "adapter.rank"
    assert recipe_path("optimizer", "rank") == "optimizer.rank"
    for slot in SLOTS:
        assert recipe_path(slot, "learning_rate") == "training.learning_rate"
        assert recipe_path(slot, "weight_decay") == "optimizer.weight_decay"
    with pytest.raises(InputError, match="Did you mean 'adapter'"):
        recipe_path("adapters", "rank")


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_a_table_names_fields_of_the_method_or_of_recipes(record: MethodRecord) -> None:
    table, slot = record.search, slot_of(record)
    assert set(table.fields) <= {*record.fields, *RECIPE_FIELDS}
    rated = (
        slot not in ("diagnosis", "watchdog", None) and "takes_no_rate" not in record.info.traits
    )
    assert ("learning_rate" in table.fields) == rated
    assert table.size is None or table.size in record.fields
    assert {name: each["path"] for name, each in search_json(record)["fields"].items()} == {
        name: recipe_path(str(slot), name) for name in table.fields
    }
    json.dumps(search_json(record))


@pytest.mark.parametrize("record", WITH_FIELDS, ids=lambda record: record.name)
def test_a_range_has_the_field_s_default_and_the_method_takes_its_values(
    record: MethodRecord,
) -> None:
    slot = slot_of(record)
    assert slot is not None
    for name, known in record.search.fields.items():
        if name in RECIPE_FIELDS and recipe_path(slot, name) != f"{slot}.{name}":
            continue
        default = record.defaults[name]
        assert default is None or default == known.default
        assert known.clip(known.default) == known.default
        for value in known.grid(7):
            record.validate({name: value})
            record.load()(**{name: value})


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_the_recipe_takes_the_ends_of_what_it_is_asked_for(record: MethodRecord) -> None:
    for name, known in record.search.fields.items():
        section, _, field = RECIPE_PATHS.get(name, "").partition(".")
        if section == "training" and field in TrainingSection.model_fields:
            for value in known.grid(3):
                assert getattr(Recipe(training={field: value}).training, field) == value


def test_an_optimizer_s_own_rate_is_the_default_of_its_range() -> None:
    seen = 0
    for record in RECORDS:
        if slot_of(record) == "optimizer":
            kind: Any = record.load()
            if not issubclass(kind, OptimizerMethod):
                continue  # a step program of its own takes the recipe's rate, or none
            rate = inspect.signature(kind.optimizer_class).parameters["lr"].default
            assert record.search.fields["learning_rate"].default == rate
            seen += 1
    assert seen >= 4


def test_the_best_rates_of_the_committed_sweep_lie_inside() -> None:
    """They are for a tiny model; a range that ends before them ends too early."""
    swept = json.loads((RESULTS / "adapter_quality.json").read_text(encoding="utf-8"))["methods"]
    named = {record.name: record for record in RECORDS}
    assert len(set(swept) & set(named)) >= 15
    for name in set(swept) & set(named):
        known = named[name].search.fields["learning_rate"]
        assert isinstance(known, LogRange)
        assert known.edge(swept[name]["rate"]) is None, name


def test_what_adapters_have_of_a_size_is_said() -> None:
    sizes = {record.name: record.search.size for record in RECORDS if slot_of(record) == "adapter"}
    assert None not in sizes.values()
    assert sizes["s2ft"] == "neurons"
    assert not isinstance(catalog()["lora"].search.fields["rank"], SearchChoice)
