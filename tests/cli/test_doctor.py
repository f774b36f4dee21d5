"""`modicum doctor`: what facts amount to, and that it says so of this machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modicum.cli import machine_facts
from modicum.cli.doctor import findings
from modicum.cli.machine_facts import EXTRAS, Disk, Gpu, MachineFacts, disk

GB = 10**9
GOOD = MachineFacts(
    modicum="0.1.0", python="3.12.1", torch="2.13.0+cpu", torch_error=None, cuda=None,
    processor="a processor", instructions="AVX2", cores=2, processors=4, threads="1",
    memory=16 * GB, available=8 * GB, nvidia=False, gpus=(), backends=("gloo",), host_error=None,
    ranks=(), open_files=4096, shared=GB, compiler="c++", missing=dict.fromkeys(EXTRAS, ()),
    cache=Disk("/cache", 9 * GB, True), temporary=Disk("/tmp", 9 * GB, True),
    here=Disk("/here", 9 * GB, True),
)  # fmt: skip


def told(**changes: Any) -> dict[str, tuple[str, str]]:
    """State and advice of what is not in order, by name."""
    found = findings(replace(GOOD, **changes))
    return {f.name: (f.state, f.advice) for f in found if f.state != "ok"}


def test_nothing_is_wrong_with_a_good_machine() -> None:
    assert told() == {}
    cuda = {"torch": "2.13.0", "cuda": "13.0", "nvidia": True, "gpus": (Gpu("H", 1, 2 * GB),)}
    assert told(**cuda) == {}


@pytest.mark.parametrize(
    ("changes", "name", "state", "advice"),
    [
        ({"python": "3.10.4"}, "Python", "wrong", "Python 3.11 or newer"),
        ({"torch": "2.9.1"}, "torch", "wrong", "pip install -U torch"),
        ({"torch": None, "torch_error": "libgomp"}, "torch", "wrong", "(libgomp)"),
        ({"threads": "8"}, "processor", "wrong", "OMP_NUM_THREADS is 8"),
        ({"available": GB}, "memory", "wrong", "end other programs"),
        ({"memory": 0}, "memory", "note", ""),
        ({"nvidia": True}, "GPU", "wrong", "built for CPUs"),
        ({"nvidia": True, "cuda": "13.0"}, "GPU", "wrong", "CUDA_VISIBLE_DEVICES"),
        ({"backends": ()}, "ranks", "note", "torch.distributed"),
        ({"host_error": "box: unknown"}, "host name", "wrong", "/etc/hosts"),
        ({"ranks": ("RANK",)}, "environment", "note", "unset"),
        ({"open_files": 256}, "open files", "note", "ulimit -n 1024"),
        ({"shared": 10**6}, "/dev/shm", "note", "--shm-size"),
        ({"compiler": None}, "C++ compiler", "note", "training.compile"),
        ({"missing": {"wandb": ("wandb",)}}, "extra wandb", "note", "modicum[wandb]"),
        ({"cache": Disk("/c", 9 * GB, False)}, "cache", "wrong", "XDG_CACHE_HOME"),
        ({"temporary": Disk("/t", 9, True)}, "temporary files", "wrong", "TMPDIR"),
        ({"here": Disk("/h", 9, True)}, "this folder", "wrong", "--out"),
    ],
)
def test_what_is_not_in_order_says_what_to_do(
    changes: dict[str, Any], name: str, state: str, advice: str
) -> None:
    found = told(**changes)
    assert list(found) == [name]
    assert found[name][0] == state
    assert advice in found[name][1]


def test_a_folder_that_is_not_there_is_looked_at_where_it_would_be(tmp_path: Path) -> None:
    found = disk(tmp_path / "not" / "there")
    assert found.writable
    assert found.free == pytest.approx(disk(tmp_path).free, rel=0.1)
    assert list(tmp_path.iterdir()) == []
    assert not disk(Path("/proc")).writable


def test_extras_are_those_of_the_project_that_somebody_may_lack() -> None:
    import tomllib

    root = Path(__file__).resolve().parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(EXTRAS) == set(project["optional-dependencies"]) - {"cli", "dev", "docs", "proofs"}


def test_it_looks_at_this_machine(modicum: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = machine_facts.look()
    assert facts.torch
    assert facts.available <= facts.memory
    assert 1 <= facts.cores <= facts.processors
    monkeypatch.setattr("modicum.cli.doctor.look", lambda: GOOD)
    ended = modicum("doctor")
    assert (ended.code, ended.err) == (0, "")
    assert "a processor, 2 of 4 cores, AVX2" in ended.out
    monkeypatch.setattr("modicum.cli.doctor.look", lambda: replace(GOOD, threads="8"))
    ended = modicum("doctor", "--json")
    assert ended.code == 5
    assert ended.err.strip() == "modicum: something is wrong with this machine: processor"
    content = json.loads(ended.out)
    assert content["wrong"] == ["processor"]
    assert {"name", "value", "state", "advice"} == set(content["findings"][0])
