"""`modicum.plan` and `modicum.train`, called with what they do not take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import modicum
from modicum.core.errors import InputError
from modicum.recipe import Recipe

WRONG: list[tuple[Any, str]] = [
    ("recipe.yaml", r"takes no str; write .*recipe_yaml.load\(path\)"),
    (Path("recipe.yaml"), r"takes no PosixPath; write .*recipe_yaml.load\(path\)"),
    ({"training": {}}, r"takes no dict; write .*modicum.Recipe\(\*\*fields\)"),
    (None, "takes no NoneType"),
    (Recipe, r"takes no class \(Recipe\)"),
]


@pytest.fixture(scope="module")
def plan() -> modicum.Plan:
    model = {"layers": 1, "width": 16, "heads": 2}
    return modicum.plan(Recipe(data={"include": ["json/**"]}, model=model))


@pytest.mark.parametrize(("value", "said"), WRONG)
def test_another_type_is_one_sentence(value: Any, said: str) -> None:
    for function in (modicum.plan, modicum.train):
        with pytest.raises(InputError, match=said):
            function(value)


def test_a_recipe_is_planned_first_and_a_plan_once(plan: modicum.Plan) -> None:
    with pytest.raises(InputError, match=r"write modicum.train\(modicum.plan\(recipe\)\)"):
        modicum.train(Recipe())  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"write modicum.train\(plan\): it is planned already"):
        modicum.plan(plan)  # type: ignore[arg-type]
    run = modicum.TrainedRun({}, "somewhere")
    with pytest.raises(InputError, match=r"takes no TrainedRun; .*resumes or extends the run"):
        modicum.train(run)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [0, -3, True, "2", 2.5])
def test_ranks_are_a_number_of_them(ranks: Any) -> None:
    with pytest.raises(InputError, match=r"plan\(ranks\): "):
        modicum.plan(Recipe(), ranks=ranks)


@pytest.mark.parametrize(
    ("name", "value"), [("out", 5), ("fork", 5), ("listener", 5), ("ranks", 2)]
)
def test_nothing_is_written_for_wrong_arguments(
    plan: modicum.Plan, tmp_path: Path, name: str, value: Any
) -> None:
    arguments = {"out": tmp_path / "run"} | {name: value}
    with pytest.raises(InputError, match=rf"train\({name}\): takes no int"):
        modicum.train(plan, **arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_takes_its_sections_by_name() -> None:
    for given in ("recipe.yaml", {"training": {"steps": 5}}):
        with pytest.raises(InputError, match=r"Recipe\(...\) takes its sections by name"):
            Recipe(given)
