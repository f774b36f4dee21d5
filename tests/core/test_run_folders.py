"""A folder that holds no run is refused with what would do, and the nearest run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from modicum.core.run_folders import nearest_run, no_run


def made(folder: Path, changed: int = 0) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    if changed:
        os.utime(folder / "run.json", (changed, changed))
    return folder


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_nearest_is_the_run_around_then_the_newest_below() -> None:
    assert nearest_run(Path()) is None
    made(Path("work/runs/old"), changed=1000)
    new = made(Path("work/runs/new"), changed=2000)
    made(Path("work/runs/new/checkpoints/inner"), changed=3000)  # within a run is none of its own
    made(Path(".hidden/run"), changed=4000)
    assert nearest_run(Path("work")) == new
    assert nearest_run(Path()) == new
    assert nearest_run(Path("work/runs/none/deeper")) == new
    assert nearest_run(Path("work/runs/old/adapter")) == Path("work/runs/old")
    assert nearest_run(Path("work/runs/old/checkpoints/step-1")) == Path("work/runs/old")


def test_runs_that_lie_too_deep_or_behind_links_are_not_looked_for() -> None:
    made(Path("a/b/c/d/run"))
    assert nearest_run(Path()) is None
    Path("link").symlink_to(Path("a/b/c"))
    assert nearest_run(Path()) is None
    assert nearest_run(Path("a")) is None
    assert nearest_run(Path("a/b")) == Path("a/b/c/d/run")


@pytest.mark.parametrize(
    ("kind", "models", "said"),
    [
        ("empty", False, "this folder holds no run (no run.json); give the folder of a run"),
        ("empty", True, "this folder holds neither a run nor a model (no run.json, no config.json);"
                        " give the folder of a run or of a model"),
        ("config.json", False, "this folder holds no run, but a model; give the folder of a run"),
        ("adapter_config.json", True,
         "this is an adapter alone; give the folder of a run or of a model"),
        ("file", False, "this is a file; give the folder of a run"),
        ("none", True, "no such folder; give the folder of a run or of a model"),
    ],
)  # fmt: skip
def test_what_is_there_and_what_would_do(kind: str, models: bool, said: str) -> None:
    place = Path("place")
    if kind == "file":
        place.write_text("")
    elif kind != "none":
        place.mkdir()
        if kind != "empty":
            (place / kind).write_text("{}")
    assert str(no_run(place, models=models)) == f"place: {said}"
    made(Path("runs/mine"))
    assert str(no_run(place, models=models)).endswith(", such as runs/mine")


def test_of_what_lies_in_a_run_the_run_is_named() -> None:
    adapter = made(Path("runs/first")) / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    said = "runs/first/adapter: this is an adapter alone; give the run's folder, runs/first"
    assert str(no_run(adapter, models=True)) == said


def test_of_a_recipe_its_own_run_is_named_before_a_newer_one() -> None:
    Path("recipes").mkdir()
    Path("recipes/mine.yaml").write_text("training: {}")
    made(Path("runs/mine"), 1_000)
    made(Path("runs/newer"), 2_000)
    assert nearest_run(Path("recipes/mine.yaml")) == Path("runs/mine")
    assert nearest_run(Path("recipes/other.yaml")) == Path("runs/newer")
