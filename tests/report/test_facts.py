"""Memory by kind and phase, out of a plan's table; numbers as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modicum.report.facts import kinds_by_phase, kinds_measured
from modicum.report.folder import FolderContents
from modicum.report.numbers import percent, quantity, short


def run(
    table: list[tuple[str, str, int]], by_phase: dict[str, int], **record: Any
) -> FolderContents:
    rows = [{"kind": kind, "phase": phase, "bytes": size} for kind, phase, size in table]
    plan = {"prediction": {"table": rows, "by_phase": by_phase}}
    return FolderContents(Path("x"), run=record, plans=[plan])


def test_an_item_stands_in_each_of_its_phases() -> None:
    table = [
        ("weight", "always", 100),
        ("activation", "forward, backward", 40),
        ("gradient", "backward, step", 30),
        ("weight", "step", 5),
        ("disk", "always", 1000),
    ]
    assert kinds_by_phase(run(table, {"forward": 140, "backward": 190, "step": 135})) == {
        "forward": {"weight": 100, "activation": 40},
        "backward": {"weight": 100, "activation": 40, "gradient": 30, "other": 20},
        "step": {"weight": 105, "gradient": 30},
    }


def test_measured_kinds_stand_next_to_the_most_that_was_predicted() -> None:
    table = [("weight", "always", 100), ("activation", "forward", 40), ("activation", "step", 50)]
    rows = kinds_measured(run(table, {}, measured_by_kind={"weight": 110, "cache": 3}))
    assert (rows[0]["predicted"], rows[0]["measured"]) == (100, 110)
    assert round(rows[0]["difference"], 6) == 0.1
    assert rows[1] == {"kind": "activation", "predicted": 50, "measured": None, "difference": None}
    assert rows[2] == {"kind": "cache", "predicted": None, "measured": 3, "difference": None}


def test_numbers_as_text() -> None:
    assert [short(n) for n in (0, 7, 999.4, 999_600, 1_000_000)] == ["0", "7", "999", "1 M", "1 M"]
    assert [percent(x, signed=True) for x in (0.0, 0.001, -0.0001, 0.0999)] == [
        "0.0 %", "+0.1 %", "0.0 %", "+10 %",
    ]  # fmt: skip
    assert quantity(None, "bytes") == quantity(float("nan"), "nats") == "–"
    assert quantity(1.5, "seconds") == "1.5 s"
    assert [quantity(s, "seconds") for s in (6.4e-5, 0.0012, 0)] == ["< 1 ms", "0.0012 s", "0 s"]
