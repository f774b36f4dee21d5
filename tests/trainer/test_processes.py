"""`modicum train --ranks`, stopped and killed over and over, from the first moment to the last."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from modicum.checkpoint import CheckpointStore

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
PATIENCE = 180.0  # seconds until a test that waits fails


class Running:
    """The command in a process of its own, followed by what it tells."""

    def __init__(self, recipe: Path, folder: Path, ranks: int) -> None:
        command = [sys.executable, "-m", "modicum", "train", str(recipe), "--out", str(folder)]
        self.process = subprocess.Popen(
            [*command, "--ranks", str(ranks), "--progress", "json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def wait_for(self, event: str) -> None:
        """Read until an event, or a phase of this name, is told; `a or b` is either."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            told = json.loads(line)
            name = told["name"] if told["event"] == "phase" else told["event"]
            if name in event.split(" or "):
                return
        raise AssertionError(f"it ended before {event}: {self.ended()}")

    def rank(self, number: int) -> int:
        """The process of a rank."""
        for pid in self.everybody():
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"RANK={number}".encode() in environment:
                return pid
        raise AssertionError(f"no process is rank {number}")

    def everybody(self) -> list[int]:
        """The processes of all ranks."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    def ended(self) -> tuple[int, str]:
        """Its exit code, and what it said."""
        _, said = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, said


def gone(pids: list[int]) -> bool:
    """Whether no such process runs any more, waiting a while for it."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if not any(_runs(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def _runs(pid: int) -> bool:
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def outcome(folder: Path) -> dict[str, Any]:
    """All of a run folder that is a function of recipe and ranks, to the bit."""

    def rows(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (folder / name).read_text().splitlines()]

    return {
        "losses": [(r["step"], r["loss"], r["gradient_norm"]) for r in rows("metrics.jsonl")],
        "evaluations": [(r["step"], r["loss"]) for r in rows("evaluations.jsonl")],
        "samples": rows("samples.jsonl"),
        "weights": (folder / "model/model.safetensors").read_bytes(),
    }


@pytest.fixture(scope="module")
def recipe(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 updates of 7 rows, with evaluations, samples and checkpoints in between."""
    values = {
        "data": {"path": str(dataset), "sequence_length": 32, "validation_fraction": 0.1},
        "model": {"layers": 2, "width": 32, "heads": 2, "vocabulary_size": 300},
        "training": {"steps": 60, "batch_size": 7, "micro_batch_size": 2, "learning_rate": 1e-2},
        "evaluation": {"every": 5, "rows": 8},
        "checkpoint": {"every": 4},
        "samples": {"prompts": ["the cat"], "tokens": 4},
    }
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture(scope="module")
def calm(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    """The outcome of a run of so many ranks that nobody disturbed."""

    @cache
    def outcome_of(ranks: int) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("calm") / "run"
        code, said = Running(recipe, folder, ranks).ended()
        assert code == 0, said
        return outcome(folder)

    return outcome_of


def test_sigterm_in_every_phase_saves_and_the_run_goes_on(recipe, calm, tmp_path) -> None:
    stopped = tmp_path / "stopped"
    for event in [
        "training tokenizer",
        "tokenizing or building",  # a stop that comes late finds the tokens written
        "building",
        "rehearsing the largest batch",
        "sample",
        "step",
        "evaluation",
        "checkpoint",
        "exporting",
    ]:
        run = Running(recipe, stopped, 2)
        run.wait_for(event)
        ranks = run.everybody()
        run.process.send_signal(signal.SIGTERM)
        code, said = run.ended()
        assert gone(ranks)
        status = json.loads((stopped / "run.json").read_text())["status"]
        if event == "exporting":  # a request so late may find the run finished
            assert (code, status) in [(0, "finished"), (4, "finished"), (4, "interrupted")], said
        else:
            assert (code, status) == (4, "interrupted"), (event, said)
    code, said = Running(recipe, stopped, 2).ended()
    assert code == 0, said
    assert outcome(stopped) == calm(2)


def test_any_of_three_ranks_may_be_killed_at_any_moment(recipe, calm, tmp_path) -> None:
    killed = tmp_path / "killed"
    for victim, event in [
        (1, "tokenizing"),
        (0, "building"),
        (2, "rehearsing the largest batch"),
        (2, "step"),
        (0, "evaluation"),
        (1, "checkpoint"),
        (1, "step"),
    ]:
        run = Running(recipe, killed, 3)
        run.wait_for(event)
        ranks = run.everybody()
        os.kill(run.rank(victim), signal.SIGKILL)
        code, said = run.ended()
        assert code == 4, (event, said)
        assert f"rank {victim} was killed by SIGKILL" in said
        assert gone(ranks)
    run = Running(recipe, killed, 3)
    run.wait_for("resumed")
    ranks = run.everybody()
    run.process.kill()  # the supervisor: its ranks end with it
    assert run.ended()[0] == -signal.SIGKILL
    assert gone(ranks)
    assert Running(recipe, killed, 3).ended()[0] == 0
    assert outcome(killed) == calm(3)


def test_a_full_disk_ends_all_ranks_and_room_lets_them_go_on(recipe, calm, tmp_path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1100k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        code, said = Running(recipe, disk / "run", 2).ended()
        assert code == 2
        assert "the disk is full" in said
        left = CheckpointStore(disk / "run/checkpoints")
        newest = left.newest()
        assert newest is not None
        assert newest.step in (4, 8)
        assert list(left.folder.glob(".*")) == []
        subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True)
        assert Running(recipe, disk / "run", 2).ended()[0] == 0
        assert outcome(disk / "run") == calm(2)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
