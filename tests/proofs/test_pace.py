"""How long a proof takes: what is remembered, what is said before and on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modicum.core.contracts.catalog import find
from modicum.proofs import ProofRun, pace
from modicum.proofs.pace import ProofPace, known_pace, pace_event, remember_pace


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(pace, "_RECORD", tmp_path / "record")
    return tmp_path


def test_time_left_is_what_it_took_from_there_by_how_fast_this_one_is() -> None:
    took = ProofPace(100.0, 3, (0.0, 10.0, 60.0))
    assert took.seconds_left(1, 0.0) == 100.0
    assert took.seconds_left(3, 60.0) == 40.0
    assert took.seconds_left(3, 120.0) == 80.0  # twice as slow up to here
    assert took.seconds_left(4, 99.0) == 1.0  # more runs than last time
    assert took.seconds_left(4, 101.0) is None
    of_record = ProofPace(100.0, 10)
    assert of_record.seconds_left(6, 100.0) == 100.0


def test_what_was_remembered_comes_before_the_result_of_record(empty_cache: Path) -> None:
    assert known_pace("lora", "quick", null=False) is None
    (empty_cache / "record").mkdir()
    record = {"seconds": 30.0, "seeds": [0, 1], "sweeps": [{"tried": [1, 2, 3]}, {"tried": [1]}]}
    (empty_cache / "record" / "lora.json").write_text(json.dumps(record))
    known = known_pace("lora", "quick", null=False)
    assert known is not None
    assert (known.seconds, known.runs, known.known_by) == (30.0, 8, "its result of record")
    assert known_pace("lora", "full", null=False) is None
    mine = ProofPace(5.0, 2, (0.0, 1.5))
    remember_pace("lora", "quick", null=False, pace=mine)
    assert known_pace("lora", "quick", null=False) == mine
    (empty_cache / "cache" / "modicum" / "proofs" / "lora.quick.json").write_text("[1]")
    assert known_pace("lora", "quick", null=False) == known


def test_a_run_says_its_number_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[dict[str, Any]] = []
    took = ProofPace(100.0, 2, (0.0, 50.0))
    this = ProofRun(find("lora"), null=False, full=False, listener=heard.append, pace=took)
    monkeypatch.setattr(ProofRun, "seconds", property(lambda self: 25.0 * len(heard)))
    for name in ("one", "two", "three"):
        this.progress(name)
    assert [(each["done"], each["total"]) for each in heard] == [(1, 2), (2, 2), (3, None)]
    assert [each["seconds_left"] for each in heard] == [100.0, 25.0, 50.0]
    assert this.pace == ProofPace(75.0, 3, (0.0, 25.0, 50.0))


def test_what_is_not_known_is_not_said() -> None:
    assert pace_event("lora", "quick", None) == {"event": "pace", "name": "lora", "mode": "quick"}
    heard: list[dict[str, Any]] = []
    this = ProofRun(find("lora"), null=False, full=False, listener=heard.append)
    this.progress("one")
    assert (heard[0]["total"], heard[0]["seconds_left"]) == (None, None)
