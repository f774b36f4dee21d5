"""Trials on a local cluster of Ray, where that is installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from modicum.comparison import Outcome, Side, Study, TrialRange
from modicum.comparison.ray_executor import RayExecutor

pytest.importorskip("ray")


class FileTrial:
    """A formula that leaves word of the process that computed it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, side: str, settings: object, seed: int, part: str) -> Outcome:
        (self.folder / f"{side}-{part}-{seed}-{os.getpid()}").touch()
        return Outcome("finished", {"a": 1.0, "b": 2.0}[side] + 0.01 * seed)


@pytest.mark.slow
def test_trials_run_in_other_processes_and_come_to_the_same(tmp_path: Path) -> None:
    sides = [Side(name, {"rate": TrialRange(1e-3, 1e-1, 1e-2)}, {"n": name}) for name in "ab"]
    seen = tmp_path / "seen"
    seen.mkdir()
    trial = FileTrial(seen)
    with RayExecutor() as executor:
        found = Study(tmp_path / "ray", sides, trial, trials=3, executor=executor).run()
    processes = {file.name.rpartition("-")[2] for file in seen.iterdir()}
    assert str(os.getpid()) not in processes
    assert found.judgement == Study(tmp_path / "here", sides, trial, trials=3).run().judgement
