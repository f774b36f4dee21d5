"""Runs that comparisons share: by which facts one is known, and what of it is taken."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from modicum import recipe_yaml
from modicum.comparison import Outcome, cache
from modicum.comparison.comparing import compare
from modicum.comparison.run_trials import RunTrials
from modicum.comparison.shared_runs import KNOWN, SharedRuns, input_digests
from modicum.recipe import Recipe
from modicum.report.compared import render_compared
from modicum.trainer.folder import METRICS, RunFolder

RATE = "training.learning_rate"
ROWS = [{"step": n, "loss": 3.0 - n / 10, "tokens": 64, "seconds": 0.5} for n in range(1, 5)]


@pytest.fixture(autouse=True)
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cache, "FOLDER", str(tmp_path / "trials"))
    return tmp_path / "trials"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    lines = (json.dumps({"text": f"{n} cats and {n % 7} dogs"}) for n in range(120))
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture
def recipe(rows: Path) -> Recipe:
    return Recipe(
        model={"layers": 1, "width": 16, "heads": 2, "vocabulary_size": 280},
        data={"path": str(rows), "sequence_length": 16, "validation_fraction": 0.2},
        training={"steps": 4, "batch_size": 4},
    )


@dataclass
class Runs(RunTrials):
    """Runs that are written down and not trained."""

    def __call__(self, side: str, settings: Any, seed: int, part: Any) -> Outcome:
        folder = self.folder / f"{side}-{len(list(self.folder.glob('*')))}"
        folder.mkdir(parents=True)
        (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        return Outcome("finished", 2.5, {}, {"accuracy": 0.5}, 256, 2.0, {"peak": 7},
                       f"d{seed}", str(folder))  # fmt: skip


def test_a_run_is_taken_with_its_curve_and_without_its_seconds(
    recipe: Recipe, tmp_path: Path
) -> None:
    asked: Any = ("a", {RATE: 0.1}, 3, "judge")
    first = SharedRuns(Runs(tmp_path / "one", {"a": recipe}))(*asked)
    assert not first.taken
    other = SharedRuns(Runs(tmp_path / "two", {"a": recipe}))
    taken = copy.deepcopy(other)(*asked)  # as one is sent to another machine
    assert taken.taken
    assert replace(taken, taken=False, seconds=2.0, folder=first.folder) == first
    assert taken.seconds is None
    assert Path(taken.folder).parent == tmp_path / "two" / KNOWN
    curve = [{name: row[name] for name in ("step", "loss", "tokens")} for row in ROWS]
    assert RunFolder(Path(taken.folder)).curve() == curve
    assert not list((tmp_path / "two").glob("a-*"))
    assert not SharedRuns(Runs(tmp_path / "two", {"a": recipe}), fresh=True)(*asked).taken


def test_what_decides_numbers_is_in_the_key(
    recipe: Recipe, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(recipe: Recipe = recipe, seed: int = 3, settings: Any = (), **how: Any) -> bool:
        runs = Runs(tmp_path / "runs", {"a": recipe}, **how)
        return SharedRuns(runs)("a", dict(settings), seed, "tune").taken

    assert [taken(), taken()] == [False, True]
    assert not taken(seed=4)
    assert not taken(recipe.changed(model__width=32))
    assert not taken(settings={RATE: 0.1})
    assert not taken(ranks=2)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert not taken()
    monkeypatch.undo()
    monkeypatch.setattr(cache, "FOLDER", str(tmp_path / "trials"))
    rows.write_text(rows.read_text().replace("cats", "cows"))
    assert not taken()


def test_a_run_that_has_begun_here_ends_here(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Any = ("a", {}, 3, "tune")
    SharedRuns(Runs(tmp_path / "one", {"a": recipe}))(*asked)
    monkeypatch.setattr(RunTrials, "begun", lambda self, *given: True)
    assert not SharedRuns(Runs(tmp_path / "two", {"a": recipe}))(*asked).taken


def test_settings_that_no_recipe_has_are_refused_all_the_same(
    recipe: Recipe, tmp_path: Path
) -> None:
    outcome = SharedRuns(RunTrials(tmp_path, {"a": recipe}))("a", {RATE: -1.0}, 0, "tune")
    assert outcome.status == "refused"


def test_only_what_digests_cover_is_shared(recipe: Recipe, rows: Path, tmp_path: Path) -> None:
    assert list(input_digests(recipe) or ()) == [str(rows)]
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("one")
    of_folder = recipe.changed(data__path=str(folder))
    before = input_digests(of_folder)
    (folder / "a.txt").write_text("two")
    assert input_digests(of_folder) != before
    (folder / "elsewhere").symlink_to(tmp_path)
    assert input_digests(of_folder) is None
    assert input_digests(recipe.changed(data__path="hub:openai/gsm8k")) is None
    assert input_digests(recipe.changed(data__path=str(tmp_path / "none"))) is None
    plugin = tmp_path / "mine.py"
    plugin.write_text("")
    assert input_digests(recipe.changed(plugins=[str(plugin)])) is None


@pytest.mark.expensive
def test_two_comparisons_train_the_side_that_they_share_once(
    recipe: Recipe, tmp_path: Path
) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(recipe_yaml.dump(recipe))
    ask: dict[str, Any] = {"trials": 1, "seeds": 2}
    one = compare(str(file), tmp_path / "one", vary="optimizer=adamw,sgd", **ask)
    two = compare(str(file), tmp_path / "two", vary="optimizer=adamw,lion", **ask)
    assert (one.taken, two.taken) == (0, 3)
    ours, theirs = (
        {row.job.seed: row.outcome for row in found.trials if row.job.side == "adamw"}
        for found in (one, two)
    )
    assert {seed: o.loss for seed, o in ours.items()} == {s: o.loss for s, o in theirs.items()}
    assert {o.seconds for o in theirs.values()} == {None}
    assert not list(tmp_path.glob("two/runs/adamw-*"))
    assert len(list(tmp_path.glob("two/runs/lion-*/run.json"))) == 3
    assert json.loads((tmp_path / "two" / "compare.json").read_text())["taken"] == 3
    assert "3 of 6 trials were taken" in render_compared(tmp_path / "two")
    again = compare(str(file), tmp_path / "two", vary="optimizer=adamw,lion", **ask)
    assert again.to_json() == two.to_json()
