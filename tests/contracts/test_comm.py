"""Every method of the wire against every check of the room: a new method needs no new test."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from modicum.core.catalog import Record, catalog, read_file
from modicum.proofs import run_battery
from modicum.proofs.contracts.base import Check, NotApplicable, checks

PLUGINS = Path(__file__).parent / "plugins"
METHODS = [record for record in catalog().values() if record.room == "comm"]
CASES = [
    pytest.param(
        record,
        entry,
        id=f"{record.name}-{entry.name}",
        marks=[pytest.mark.dear, pytest.mark.ranks] if entry.dear else [],
    )
    for record in METHODS
    for entry in checks("comm")
]


@pytest.mark.parametrize(("record", "entry"), CASES)
def test_method_of_the_wire(record: Record, entry: Check) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            entry.run(record.load())
        except NotApplicable as reason:
            pytest.skip(str(reason))


def test_the_catalog_has_schedules_and_every_check_says_what_it_promises() -> None:
    assert "dear" in {record.name for record in METHODS}
    battery = checks("comm")
    assert len(battery) == len({entry.name for entry in battery}) >= 9
    assert all(entry.sentence.endswith(".") for entry in battery)


def test_a_broken_schedule_is_found_wanting_and_told_why() -> None:
    (record,) = read_file(PLUGINS / "hasty.py")
    results = {result.name: result for result in run_battery(record, cheap_only=True)}
    wanting = {name for name, result in results.items() if not result.passed}
    assert wanting >= {
        "one_process",
        "hyper_parameters_of_the_step",
        "no_update_of_what_is_not_finite",
        "state_and_resume",
    }
    assert "a weight differs by" in results["one_process"].message
    assert results["alone_nothing_is_sent"].passed


@pytest.mark.ranks
@pytest.mark.dear
def test_traffic_that_the_ledger_hides_is_found() -> None:
    (record,) = read_file(PLUGINS / "hasty.py")
    (entry,) = (entry for entry in checks("comm") if entry.name == "traffic")
    with pytest.raises(AssertionError, match="all_gather: the ledger says 0 bytes"):
        entry.run(record.load())
