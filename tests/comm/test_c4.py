"""C4 as a method: its section goes with all others, and it is what `watch` is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modicum.comm import C4, DeAR
from modicum.core.errors import InputError
from modicum.core.run_folders import note_interrupted
from modicum.planner.combinations import COLUMNS, PROVEN, refusal, rows
from modicum.recipe import Recipe, differences


def test_it_goes_with_methods_of_its_room_and_with_a_diagnosis() -> None:
    recipe = Recipe(watchdog=C4(late_seconds=9.0), comm=DeAR(), diagnosis={"method": "lora_limits"})
    assert recipe.method("watchdog") == C4(late_seconds=9.0)
    (row,) = [row for row in rows() if row.name == "c4"]
    asked = [column for column in COLUMNS if column not in PROVEN and column != "quantized"]
    assert {column: refusal(row, column) for column in asked} == dict.fromkeys(asked)


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"comm": {"method": "c4"}}, r"stands in the section 'watchdog'"),
        ({"watchdog": {"method": "dear"}}, r"stands in the section 'comm'.*allowed: .*c4"),
        ({"watchdog": {"method": "c4", "slow_share": 0.0}}, "watchdog.slow_share: too small"),
        ({"watchdog": {"method": "c4", "slow_share": 1.0}}, "watchdog.slow_share: too large"),
        ({"watchdog": {"method": "c4", "silent_seconds": 2.9}}, "silent_seconds: too small"),
        ({"watchdog": {"method": "c4", "silent": 3}}, "unknown key"),
    ],
)
def test_what_does_not_stand_there_is_refused(sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Recipe(**sections)


def test_nobody_watches_unless_a_recipe_says_so() -> None:
    assert Recipe().watchdog is None
    changes = differences(Recipe().plain(), Recipe(watchdog=C4()).plain())
    assert len(changes) == 1
    assert changes[0].startswith("watchdog")


def test_alone_it_watches_nobody() -> None:
    with C4().watch(record="never", run="never") as watched:
        assert watched.alone
    assert watched.cause(0.0) is None
    assert not Path("never").exists()


def test_a_run_that_says_nothing_itself_is_said_to_be_interrupted(tmp_path: Path) -> None:
    record = tmp_path / "run.json"
    running = {"modicum": "1", "status": "running", "interruptions": 2, "error": None}
    record.write_text(json.dumps(running))
    note_interrupted(record, "rank 3 (host b) is dead since 0 s")
    said = json.loads(record.read_text())
    assert said.pop("ended") > "2020"
    assert said == {
        "modicum": "1",
        "status": "interrupted",
        "interruptions": 3,
        "error": "rank 3 (host b) is dead since 0 s",
        "failed_by": "PeerLost",
    }
    note_interrupted(record, "another sentence")
    assert json.loads(record.read_text())["error"] == "rank 3 (host b) is dead since 0 s"
    with pytest.raises(InputError):
        note_interrupted(tmp_path / "nothing", "a sentence")
