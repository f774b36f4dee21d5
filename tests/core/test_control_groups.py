"""The control groups around a process, by the file in which the system names its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from modicum.core import control_groups
from modicum.core.control_groups import groups_around


def test_every_group_around_a_process_is_found_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    monkeypatch.setattr(control_groups, "CGROUPS", tmp_path)
    monkeypatch.setattr(control_groups, "OWN_CGROUP", own)
    assert groups_around() == [tmp_path]  # the system has none
    own.write_bytes(b"12:cpu:/elsewhere\n0::/\n")
    assert groups_around() == [tmp_path]
    # A name is bytes: it may be no UTF-8, and have in it what ends a line of text.
    own.write_bytes(b"4:memory:/\xff\n0::/caf\xe9/a\x0cb\n")
    outer = tmp_path / os.fsdecode(b"caf\xe9")
    assert groups_around() == [tmp_path, outer, outer / "a\x0cb"]
