"""The page of several runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.report.conftest import RECIPE
from tests.report.test_report import Page

from modicum import report
from modicum.core.errors import InputError

MakeRun = Callable[..., Path]


def test_it_shows_figures_and_differences_side_by_side(make_run: MakeRun, tmp_path: Path) -> None:
    first, second = make_run("first"), make_run("second", final={"validation_loss": 1.5})
    (second / "recipe.yaml").write_text(RECIPE.replace("0.002", "0.004"))
    shown = Page(report.compare([first, second], tmp_path / "both.html").read_text())
    assert not shown.unbalanced
    assert "first finished 2.3456 2.1234 240 983 k tokens 7,432 tokens/s" in shown.text
    assert "second finished 1.5000" in shown.text
    assert "training.learning_rate 0.002 0.004" in shown.text
    assert "training.steps" not in shown.text
    assert shown.text.count("Parse text & return a list.") == 2
    assert "Where their time went" in shown.text
    assert "compute 2 min 11 s (87 %) 2 min 11 s (87 %)" in shown.text


def test_runs_of_one_name_are_called_by_their_paths(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("a/run", steps=3), make_run("b/run", steps=3)]
    text = Page(report.compare(runs, tmp_path / "both.html").read_text()).text
    for run in runs:
        assert f"{run} finished" in text
    assert "Nowhere: all fields are equal." in text


def test_files_of_others_are_left_alone(make_run: MakeRun, tmp_path: Path) -> None:
    run, other = make_run(steps=3), tmp_path / "notes.html"
    other.write_text("mine")
    with pytest.raises(InputError, match="another file, which is left alone"):
        report.compare([run], other)
    assert other.read_text() == "mine"
    with pytest.raises(InputError, match="named twice"):
        report.compare([run, run.parent / "." / run.name], tmp_path / "both.html")
    with pytest.raises(InputError, match="no such folder to write into"):
        report.compare([run], tmp_path / "absent/both.html")
    page = report.compare([run], tmp_path / "one.html")
    assert report.compare([run], page) == page


def test_what_runs_lack_is_no_obstacle(make_run: MakeRun, tmp_path: Path) -> None:
    first, second = make_run("first", steps=3), tmp_path / "second"
    second.mkdir()
    (second / "run.json").write_text(json.dumps({"status": "<b>"}))
    shown = Page(report.compare([first, second], tmp_path / "both.html").read_text())
    assert not shown.unbalanced
    assert "<b>" not in shown.html
    assert "compute 2 min 11 s (87 %) –" in shown.text
