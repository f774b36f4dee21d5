"""`modicum report --text`: a run on a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.report.conftest import run_folder


def test_report_text_has_plan_losses_and_time(modicum: Any, tmp_path: Path) -> None:
    ended = modicum("report", run_folder(tmp_path / "demo"), "--text")
    lines = [" ".join(line.split()) for line in ended.out.splitlines()]
    assert lines[0] == "demo: finished after 240 steps in 2 min 31 s"
    assert "Tensors at the peak 512 MB 499 MB −2.6 %" in lines
    assert "0 – 3.9871" in lines
    assert any(line.startswith("240 2.0") and line.endswith(" 2.3757") for line in lines)
    assert len([line for line in lines if line.split(" ")[0].isdigit()]) == 11
    assert "compute 2 min 11 s 87 % forward 40 s" in " ".join(lines)
    assert "unexplained 1 s 0.7 %" in lines
    assert not (tmp_path / "demo" / "report.html").exists()


def test_report_text_has_the_test(modicum: Any, tmp_path: Path) -> None:
    test = {"step": 240, "loss": 2.4567, "tokens": 9, "rows": 3}
    ended = modicum("report", run_folder(tmp_path / "demo", final={"test": test}), "--text")
    lines = [" ".join(line.split()) for line in ended.out.splitlines()]
    assert lines[lines.index("Metric Test") :][-1].startswith("unexplained")
    assert "loss 2.4567" in lines


def test_a_name_moves_no_cursor(modicum: Any, tmp_path: Path) -> None:
    ended = modicum("report", run_folder(tmp_path / "de\x1b[2Jmo"), "--text")
    assert ended.out.startswith("de␛[2Jmo: finished")
    assert "\x1b" not in ended.out


def test_what_a_run_lacks_is_left_out(modicum: Any, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"status": "running", "steps": 0}))
    ended = modicum("report", tmp_path, "--text")
    assert "running after 0 steps" in ended.out
    assert "Where the time went" not in ended.out
    assert "Up to step" not in ended.out


def test_text_and_json_are_two_things(modicum: Any, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "demo", steps=3)
    ended = modicum("report", folder, "--text", "--json")
    assert ended.code == 2
    assert "--text" in ended.err
    assert "--json" in ended.err
