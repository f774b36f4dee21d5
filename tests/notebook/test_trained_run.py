"""What a run gives in Python, and how a notebook shows it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from modicum.core.errors import InputError
from modicum.notebook.progress import NotebookProgress, notebook_display
from modicum.notebook.trained_run import TrainedRun
from modicum.notebook.training import default_folder
from modicum.recipe import Recipe


class Display(ModuleType):
    """As `IPython.display`: keeps what an output shows."""

    def __init__(self) -> None:
        super().__init__("IPython.display")
        self.pictures: list[str] = []

    def HTML(self, text: str) -> str:  # noqa: N802 - IPython's name
        return text

    def display(self, content: str, *, display_id: bool) -> Any:
        assert display_id
        return SimpleNamespace(update=self.pictures.append)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    metrics = [{"step": 1, "loss": 2.0, "tokens": 3}, {"step": 2, "loss": 1.0, "tokens": 3}]
    evaluations = [{"step": 0, "loss": 2.5}, {"step": 2, "loss": 1.5}]
    for name, rows in (("metrics", metrics), ("evaluations", evaluations)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_a_run_is_its_record(folder: Path) -> None:
    run = TrainedRun({"status": "finished", "steps": 2}, folder)
    assert run == {"status": "finished", "steps": 2}
    assert json.loads(json.dumps(run)) == run
    assert [row["loss"] for row in run.metrics] == [2.0, 1.0]
    assert [row["step"] for row in run.evaluations] == [0, 2]
    assert TrainedRun({}, folder / "nowhere").metrics == []


def test_curves_are_a_row_a_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}

    def from_records(rows: list[dict[str, Any]], index: str) -> str:
        made.update(rows=rows, index=index)
        return "frame"

    pandas = ModuleType("pandas")
    pandas.DataFrame = SimpleNamespace(from_records=from_records)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    assert TrainedRun({}, folder).curves() == "frame"
    assert made["index"] == "step"
    assert made["rows"] == [
        {"step": 0, "validation_loss": 2.5},
        {"step": 1, "loss": 2.0, "tokens": 3},
        {"step": 2, "loss": 1.0, "tokens": 3, "validation_loss": 1.5},
    ]


def test_curves_without_pandas_say_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match=r"curves\(\) needs pandas.*modicum\[notebook\]"):
        TrainedRun({}, folder).curves()


def test_a_run_shows_itself_and_nothing_in_it_is_html(folder: Path) -> None:
    content = {
        "status": "<b>finished", "steps": 2, "seconds": 61.0,
        "final": {"loss": 1.0, "validation_loss": None, "test": {"loss": 1.25}},
        "outputs": {"model": "model/"},
        "peak_bytes": {"process": 10**9},
    }  # fmt: skip
    shown = TrainedRun(content, folder)._repr_html_()
    assert "<td>&lt;b&gt;finished</td>" in shown
    assert "<td>1.0000</td>" in shown
    assert "<td>1.2500</td>" in shown
    assert "validation loss" not in shown
    assert f"<td>{folder}/model</td>" in shown


def test_a_recipe_has_its_folder() -> None:
    one = Recipe(training={"steps": 5}, data={"limit": "1MB"})
    assert default_folder(one) == default_folder(one.changed(training__steps=9))
    assert default_folder(one) == default_folder(one.changed(parallel__strategy="ddp"))
    assert default_folder(one) == default_folder(one.changed(tracking__to=["wandb"]))
    epochs = Recipe(training={"epochs": 2}, data={"limit": "1MB"})
    assert default_folder(epochs) == default_folder(epochs.changed(training__epochs=3))
    assert default_folder(one) != default_folder(one.changed(training__seed=1))
    assert default_folder(one).name.startswith("full-")


def test_paths_of_another_folder_are_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(data={"path": "texts"}, model={"path": "m"}, adapter={"method": "lora"})
    here = default_folder(recipe)
    assert here.name.startswith("lora-")
    monkeypatch.chdir(tmp_path)
    assert default_folder(recipe) != here


def test_progress_is_one_output_that_ends_with_how_it_ended() -> None:
    display = Display()
    with NotebookProgress(display) as tell:
        tell({"event": "phase", "name": "building", "done": 0, "total": None})
        tell({"event": "step", "step": 1, "steps": 2, "loss": 3.0, "tokens_per_second": 10.0})
        tell({"event": "step", "step": 2, "steps": 2, "loss": 2.0, "tokens_per_second": 10.0})
        tell({"event": "warning", "message": "<late>"})
        tell({"event": "finished", "status": "finished", "steps": 2, "seconds": 1.0})
    assert display.pictures[0] == "<pre>building</pre>"
    assert any("step 2/2" in picture and 'value="1.000"' in picture for picture in display.pictures)
    assert "warning: &lt;late&gt;" in display.pictures[-1]
    assert "finished after 2 steps" in display.pictures[-1]
    assert "step 2/2" not in display.pictures[-1]


def test_a_notebook_is_known_by_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert notebook_display() is None
    display, shell = Display(), SimpleNamespace()
    ipython = ModuleType("IPython")
    ipython.get_ipython = lambda: shell  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    assert notebook_display() is None  # a terminal's
    shell.kernel = object()
    assert notebook_display() is display
