from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from formula_trials import Bowl, sides

from modicum.comparison import Settings, SharedTrials, Study, TrialPart


def recipe(side: str, settings: Settings, seed: int, part: TrialPart) -> Mapping[str, Any]:
    return {"bowl": 1, "settings": sorted(settings.items()), "seed": seed, "part": part}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_studies_share_what_they_train_alike_but_no_times(tmp_path: Path) -> None:
    first, second = Bowl(deviation=0), Bowl(deviation=0)
    one = Study(tmp_path / "1", sides("a", "b"), SharedTrials(first, recipe), sampler="grid").run()
    two = Study(tmp_path / "2", sides("a", "c"), SharedTrials(second, recipe), sampler="grid").run()
    assert {call[0] for call in first.calls} == {"a", "b"}
    assert {call[0] for call in second.calls} == {"c"}
    ours, theirs = (
        [row.outcome for row in found.trials if row.job.side == "a"] for found in (one, two)
    )
    assert [replace(o, seconds=None) for o in ours] == [replace(o, taken=False) for o in theirs]
    assert {o.seconds for o in ours} == {1.0}
    assert {o.taken for o in theirs} == {True}
    assert (one.taken, two.taken) == (0, len(theirs))
    assert two.to_json()["taken"] == len(theirs)


@pytest.mark.parametrize("status", ["crashed", "out_of_memory", "refused"])
def test_what_may_end_otherwise_next_time_is_not_kept(status: str) -> None:
    bowl = Bowl(ends={("a", 1): status})
    shared = SharedTrials(bowl, recipe)
    for _ in range(2):
        assert shared("a", {"rate": 0.1}, 1, "tune").message == f"a is {status}"
    assert len(bowl.calls) == 2
    bowl.ends = {("a", 1): "diverged"}
    assert [shared("a", {"rate": 0.1}, 1, "tune").status for _ in range(2)] == ["diverged"] * 2
    assert len(bowl.calls) == 3


def test_what_nothing_is_known_by_is_trained_and_so_is_all_that_is_asked_for_anew() -> None:
    bowl = Bowl()
    unknown = SharedTrials(bowl, lambda *given: None)
    assert not any(unknown("a", {"rate": 0.1}, 1, "tune").taken for _ in range(2))
    anew = SharedTrials(bowl, recipe, fresh=True)
    assert not any(anew("a", {"rate": 0.1}, 1, "tune").taken for _ in range(2))
    assert len(bowl.calls) == 4
    assert SharedTrials(bowl, recipe)("a", {"rate": 0.1}, 1, "tune").taken


def test_other_sources_and_damaged_entries_are_trained_again(cache: Path) -> None:
    bowl = Bowl()
    for sources in ("one", "one", "other"):
        SharedTrials(bowl, recipe, sources=sources)("a", {"rate": 0.1}, 1, "tune")
    assert len(bowl.calls) == 2
    for file in cache.rglob("*.json"):
        file.write_text('{"outcome": {"status": "fine"}}')
    shared = SharedTrials(bowl, recipe, sources="one")
    assert shared("a", {"rate": 0.1}, 1, "tune").status == "finished"
    assert len(bowl.calls) == 3
