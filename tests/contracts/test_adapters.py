"""Every adapter of the catalog against every check of the room: a new method needs no new test."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from modicum.core.catalog import Record, catalog, read_file
from modicum.core.errors import InputError
from modicum.proofs import run_battery
from modicum.proofs.contracts.base import Check, NotApplicable, checks

PLUGINS = Path(__file__).parent / "plugins"
ADAPTERS = [record for record in catalog().values() if record.room == "adapters"]
CASES = [
    pytest.param(
        record,
        entry,
        id=f"{record.name}-{entry.name}",
        marks=[pytest.mark.dear] if entry.dear else [],
    )
    for record in ADAPTERS
    for entry in checks("adapters")
]


@pytest.mark.parametrize(("record", "entry"), CASES)
def test_adapter(record: Record, entry: Check) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            entry.run(record.load())
        except NotApplicable as reason:
            pytest.skip(str(reason))


def test_the_catalog_has_adapters_and_every_check_says_what_it_promises() -> None:
    assert "lora" in {record.name for record in ADAPTERS}
    battery = checks("adapters")
    assert len(battery) == len({entry.name for entry in battery}) >= 25
    assert all(entry.sentence.endswith((".", ":")) for entry in battery)
    assert 0 < len(checks("adapters", cheap_only=True)) < len(battery)


def test_a_plugin_in_one_file_passes_the_battery() -> None:
    (record,) = read_file(PLUGINS / "outer.py")
    told = []
    results = run_battery(record, cheap_only=True, listener=told.append)
    assert [(result.name, result.message) for result in results if not result.passed] == []
    assert told == results
    assert {result.name for result in results if result.skipped} == set()


def test_a_broken_plugin_is_found_wanting_and_told_why() -> None:
    (record,) = read_file(PLUGINS / "broken.py")
    results = {result.name: result for result in run_battery(record, cheap_only=True)}
    wanting = {name for name, result in results.items() if not result.passed}
    assert wanting >= {"merged_equals_unmerged", "parameters_and_bytes", "work", "dropout"}
    assert "merged model computes something else" in results["merged_equals_unmerged"].message
    assert "PyTorch counts" in results["work"].message
    assert results["starts_as_the_base"].passed
    assert results["file_round_trip"].skipped


def test_a_value_can_be_checked_too() -> None:
    from modicum.adapters import LoRA

    results = run_battery(LoRA(rank=3, alpha=6.0), cheap_only=True)
    assert all(result.passed for result in results)


def test_a_room_without_a_battery_is_refused() -> None:
    with pytest.raises(InputError, match="no battery"):
        checks("solvers")
