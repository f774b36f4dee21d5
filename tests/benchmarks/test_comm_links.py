"""The benchmark of exchanges tries a shaped link with a cold message before it believes it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from tests.benchmarks.conftest import ROOT

from modicum.core.errors import InputError

RATES, MESSAGE = {1.0: 2.5e6, 3.0: 1.0e6}, 200_000


@pytest.mark.parametrize(
    ("off", "believed"), [(1.1, True), (0.9, True), (1.2, False), (0.5, False)]
)
def test_a_link_that_is_not_its_rate_is_refused(
    monkeypatch: pytest.MonkeyPatch, off: float, believed: bool
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    bench: Any = importlib.import_module("comm")
    asked = []

    def shaped(ranks: int, rates: list[str], function: str, *_: Any, **more: Any) -> list[Any]:
        asked.append(function)
        assert rates == ["20000kbit", "8000kbit"]
        assert more["bursts"] == [bench.burst_for(rate, MESSAGE) for rate in RATES.values()]
        exact, wrong = (MESSAGE / rate for rate in RATES.values())
        return [exact, off * wrong] if function == bench.COLD else [{"of": 1}, {"of": 3}]

    monkeypatch.setattr(bench, "shaped", shaped)
    monkeypatch.setattr(bench, "judged_all", lambda world, found: found)
    if believed:
        found = bench.on_shaped_links(bench.QUICK, RATES, MESSAGE)
        assert found == {1.0: {"of": 1}, 3.0: {"of": 3}}
        assert asked == [bench.COLD, f"{bench.BENCH}:curve"]
    else:
        with pytest.raises(InputError, match=r"a cold message takes .* of its bytes' time"):
            bench.on_shaped_links(bench.QUICK, RATES, MESSAGE)
        assert asked == [bench.COLD]
