"""The battery of matrix exchanges finds the mistakes that they are made with."""

from __future__ import annotations

from pathlib import Path

import pytest

from modicum.core.contracts.catalog import read_file
from modicum.proofs import run_battery


@pytest.mark.ranks
@pytest.mark.expensive
def test_a_broken_exchange_is_found_wanting_and_told_why() -> None:
    (record,) = read_file(Path(__file__).parent / "plugins" / "careless.py")
    results = {result.name: result for result in run_battery(record)}
    wanting = {name for name, result in results.items() if not result.passed}
    assert wanting == {
        "matrices_sums",
        "matrices_traffic",
        "matrices_skipped",
        "matrices_resume",
        "matrices_in_training",
        "matrices_under_transformers",
    }
    assert "the ledger says {}" in results["matrices_traffic"].message
    assert "a NaN was summed to finite numbers" in results["matrices_skipped"].message
    assert results["matrices_used"].passed
    assert not results["matrices_used"].skipped
    assert results["exchange_sums"].skipped
    assert results["two_ranks"].skipped
