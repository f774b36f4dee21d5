"""The battery of schedules finds the mistakes that schedules are made with."""

from __future__ import annotations

from pathlib import Path

import pytest

from modicum.core.contracts.catalog import read_file
from modicum.proofs import run_battery
from modicum.proofs.contracts.base import checks

PLUGINS = Path(__file__).parent / "plugins"


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
@pytest.mark.expensive
def test_traffic_that_the_ledger_hides_is_found() -> None:
    (record,) = read_file(PLUGINS / "hasty.py")
    (entry,) = (entry for entry in checks("comm") if entry.name == "traffic")
    with pytest.raises(AssertionError, match="all_gather: the ledger says 0 bytes"):
        entry.run(record.load())
