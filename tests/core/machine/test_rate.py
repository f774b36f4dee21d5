"""Commands that follow each other share one rate, and so one forecast of time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from modicum.core.machine.identity import record_file
from modicum.core.machine.rate import SHARED_SECONDS, shared_machine

CPU = torch.device("cpu")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return record_file("cpu").with_suffix(".rate.json")


def test_other_processes_take_the_rate_of_the_first(file: Path) -> None:
    first = shared_machine(CPU).flops
    threads = torch.get_num_threads()
    script = (
        f"import torch; torch.set_num_threads({threads})\n"
        "from modicum.core.machine.rate import shared_machine\n"
        "print(shared_machine(torch.device('cpu')).flops)"
    )
    said = [subprocess.check_output([sys.executable, "-c", script], text=True) for _ in range(2)]
    assert [float(each) for each in said] == [first, first]


@pytest.mark.parametrize("age", [-1.0, SHARED_SECONDS + 1.0])
def test_a_rate_of_another_time_is_timed_again(file: Path, age: float) -> None:
    shared_machine(CPU)
    known = json.loads(file.read_text())
    file.write_text(json.dumps({"flops": 1.0, "when": known["when"] - age}))
    assert shared_machine(CPU).flops > 1e6
    assert json.loads(file.read_text())["flops"] > 1e6


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"flops": "x", "when": 0}',
        '{"flops": -1}',
        "{}",
        pytest.param("[" * 100_000, id="brackets in brackets"),
        pytest.param(f'{{"flops": {10**400}, "when": 0}}', id="more than a float"),
    ],
)
def test_a_damaged_file_is_written_anew(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    assert shared_machine(CPU).flops == json.loads(file.read_text())["flops"] > 1e6


def test_without_a_cache_it_is_timed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.parent.parent.mkdir(parents=True, exist_ok=True)
    file.parent.write_text("no folder")
    assert shared_machine(CPU).flops > 1e6
