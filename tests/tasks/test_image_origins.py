"""A run on a user's own images: planned, trained, resumed, exported, looked at."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pool import Pool

import modicum
from modicum.core.errors import InputError
from modicum.core.ranks.ranks import Ranks
from modicum.models.convnet import load
from modicum.recipe import Recipe
from modicum.tasks import task_of
from modicum.trainer import evaluate_run

Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for label, shade, count in (("dark", 20, 12), ("light", 220, 20)):
        (root / label).mkdir()
        for n in range(count):
            Image.new("L", (9, 7), shade + n).save(root / label / f"{n}.png")
    return root


def recipe(folder: Path, **task: Any) -> Recipe:
    asked = {"method": "images", "data_path": str(folder), "size": 8, "colour": "grey"}
    return Recipe(
        task=asked | {"widths": [4, 4], "validation_fraction": 0.25} | task,
        training={"steps": 12, "batch_size": 8, "learning_rate": 0.03, "compile": "none"},
        evaluation={"every": 4, "metric": "macro_f1", "keep_best": True},
    )


@pytest.mark.expensive
def test_a_run_learns_to_tell_them_apart(folder: Path, tmp_path: Path) -> None:
    plan = modicum.plan(recipe(folder))
    counts = {"rows": 24, "classes": {"dark": 9, "light": 15}, "exact": True}
    assert plan.counts == counts
    run = modicum.train(plan, tmp_path / "run")
    assert run["data"] == counts
    last = run.evaluations[-1]
    assert last["macro_f1"] == last["accuracy"] == 1.0
    assert last["by_class"] == {"dark": 1.0, "light": 1.0}
    assert run["best"]["metric"] == "macro_f1"
    exported = tmp_path / "run" / "model"
    assert json.loads((exported / "images.json").read_text())["classes"] == ["dark", "light"]
    assert load(exported).config.classes == 2
    assert "dark 9, light 15" in run.report().read_text()
    longer = modicum.train(
        modicum.plan(recipe(folder).changed(training__steps=14)), tmp_path / "run"
    )
    assert longer["steps"] == 14


def trains(ranks: Ranks, asked: Recipe, out: Path) -> list[float]:
    run = modicum.train(modicum.plan(asked, ranks=ranks), out, ranks=ranks)
    return [row["loss"] for row in run.metrics] if ranks.first else []


@pytest.mark.expensive
@pytest.mark.ranks
def test_ranks_train_as_one_process_does(pool: Pool, folder: Path, tmp_path: Path) -> None:
    asked = recipe(folder).changed(training__steps=3)
    alone = trains(Ranks(), asked, tmp_path / "alone")
    both = pool.run(trains, asked, tmp_path / "both", ranks=2)[0]
    assert both == pytest.approx(alone, rel=1e-4)


def test_fields_of_the_other_kind_are_refused(folder: Path, tmp_path: Path) -> None:
    made = Recipe(task={"method": "images", "size": 8})
    with pytest.raises(InputError, match=r"task.size: is of your own images.*found: 8"):
        task_of(made).look(made)
    odd = recipe(folder, size=7)
    with pytest.raises(InputError, match=r"task.size: is halved 1 times"):
        task_of(odd).look(odd)
    none = recipe(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"nowhere: task.data_path: there is no such folder"):
        task_of(none).look(none)
    few = recipe(folder, validation_fraction=0.001)
    with pytest.raises(InputError, match=r"task.validation_fraction: no class has so many"):
        task_of(few).look(few)


def test_a_damaged_image_is_named_before_step_one(folder: Path, tmp_path: Path) -> None:
    asked = recipe(folder)
    task = task_of(asked)
    inputs = task.look(asked)
    file = folder / "light" / "3.png"
    content = file.read_bytes()
    file.write_bytes(content[:40])
    try:
        with pytest.raises(InputError, match=r"light/3.png: task.data_path: is no PNG or JPEG, or"):
            task.prepare(asked, inputs, tmp_path, lambda *_: None, Ranks())
    finally:
        file.write_bytes(content)
    assert not (tmp_path / "data").exists()


def test_own_images_have_a_test(folder: Path, tmp_path: Path) -> None:
    asked = recipe(folder, test_fraction=0.25).changed(evaluation__test=True, training__steps=2)
    plan = modicum.plan(asked)
    assert plan.counts["rows"] == 32 - 8 - 6  # a quarter of what the test leaves is validation
    assert plan.inputs.described.endswith(", 6 of them for validation, 8 for test")
    content = modicum.train(plan, tmp_path / "run")
    found = content["final"]["test"]
    assert (found["rows"], found["images"]) == (8, 8)
    assert evaluate_run(tmp_path / "run") == found
    asked = recipe(folder, test_path=str(folder))
    own = task_of(asked).look(asked)
    assert own.described.endswith(f"; test: {folder}: 32 images")


def test_a_test_that_is_trained_on_is_refused(folder: Path, tmp_path: Path) -> None:
    for label in ("dark", "light"):
        (tmp_path / "test" / label).mkdir(parents=True)
    shutil.copy(folder / "dark" / "3.png", tmp_path / "test" / "dark")
    Image.new("L", (9, 7), 100).save(tmp_path / "test" / "light" / "new.png")
    asked = recipe(folder, test_path=str(tmp_path / "test"), validation_fraction=0.0)
    asked = asked.changed(evaluation__keep_best=False, training__steps=1)
    with pytest.raises(InputError, match=r"1 of its images are trained on too, so it is") as error:
        modicum.train(modicum.plan(asked), tmp_path / "run")
    assert error.value.field == "task.test_path"
    Image.new("L", (9, 7), 101).save(tmp_path / "test" / "dark" / "3.png")
    assert modicum.train(modicum.plan(asked), tmp_path / "run")["status"] == "finished"


@pytest.mark.parametrize(("part", "has"), [("test", True), ("validation", False)])
def test_a_folder_of_a_test_is_a_test(part: str, has: bool, tmp_path: Path) -> None:
    for place in (part, "train"):
        for label in ("a", "b"):
            (tmp_path / place / label).mkdir(parents=True)
            for n in range(4):
                (tmp_path / place / label / f"{n}.png").touch()
    asked = recipe(tmp_path)
    assert task_of(asked).has_test(asked) is has
    drawn = recipe(tmp_path, test_fraction=0.25)
    assert task_of(drawn).has_test(drawn)
