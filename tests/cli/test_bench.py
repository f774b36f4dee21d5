"""`modicum bench machine`: what it says of a machine that has more than a processor."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from modicum.cli import bench
from modicum.core.machine.record import OtherRuns, placeholder
from modicum.planner.profiles import profile_of


def test_a_profile_has_what_was_measured_of_runs_that_read_no_text() -> None:
    others = OtherRuns(10_000_000, (0.3, 0.4), 0.2), OtherRuns(5_000_000, (0.0, 0.1), 0.05)
    record = replace(placeholder(), images=others[0], sequences=others[1])
    made = profile_of(bench._profile(record), "mine.json")
    for reads in ("images", "sequences"):
        known, run = record.of_run(reads), made.of_run(reads)
        assert (run.record.kept, run.record.efficiency) == (known.kept, known.efficiency)
        more = run.base - made.base
        assert more == pytest.approx(known.still_loaded(), abs=2_000_000)


@pytest.mark.parametrize("gpu", [False, True])
def test_that_a_gpu_is_not_described_is_said_apart_from_the_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], gpu: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(bench, "machine_record", lambda **_: placeholder())
    monkeypatch.setattr(bench, "_profile", lambda record: {"device": "cpu"})
    bench.show_machine(again=False, as_json=True)
    said = capsys.readouterr()
    assert json.loads(said.out)["profile"] == {"device": "cpu"}
    assert ("the processor, and not the CUDA device" in said.err) is gpu
    assert len(said.err.splitlines()) == int(gpu)
