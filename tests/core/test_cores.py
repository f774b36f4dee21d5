"""How many cores there are for a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from modicum.core import control_groups
from modicum.core.cores import usable_cores


def test_the_tightest_limit_of_all_groups_around_a_process_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = tmp_path / "outer"
    inner = outer / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "own").write_bytes(b"0::/outer/inner/by-another-path\n")
    monkeypatch.setattr(control_groups, "CGROUPS", tmp_path)
    monkeypatch.setattr(control_groups, "OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)), raising=False)
    assert usable_cores() == 8  # no group says anything
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (outer / "cpu.max").write_text("350000 100000\n")
    (inner / "cpu.max").write_text("600000 100000\n")
    assert usable_cores() == 3
    (inner / "cpu.max").write_text("50000 100000\n")
    assert usable_cores() == 1
