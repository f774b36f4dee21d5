"""The battery of exchanges finds the mistakes that exchanges are made with."""

from __future__ import annotations

from pathlib import Path

import pytest

from modicum.core.contracts.catalog import read_file
from modicum.proofs import run_battery


@pytest.mark.ranks
@pytest.mark.expensive
def test_a_broken_exchange_is_found_wanting_and_told_why() -> None:
    (record,) = read_file(Path(__file__).parent / "plugins" / "drifting.py")
    results = {result.name: result for result in run_battery(record)}
    wanting = {name for name, result in results.items() if not result.passed}
    assert wanting == {
        "exchange_alone",
        "exchange_sums",
        "exchange_copies",
        "exchange_resumes",
        "exchange_not_finite",
    }
    assert results["exchange_copies"].message == "ranks' copies differ"
    assert "off by 0.5" in results["exchange_sums"].message
    assert results["exchange_traffic"].passed
    assert not results["exchange_traffic"].skipped
