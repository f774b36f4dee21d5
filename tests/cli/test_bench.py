"""`modicum bench machine`: what it says of a machine that has more than a processor."""

from __future__ import annotations

import json

import pytest
import torch

from modicum.cli import bench
from modicum.core.machine.record import placeholder


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
