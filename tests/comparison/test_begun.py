"""A comparison that is resumed keeps what it began with, whatever memory is free by now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from quick_runs import QuickRuns

from modicum import recipe_yaml
from modicum.comparison import cache
from modicum.comparison.begun import BegunComparison
from modicum.comparison.budgets import Sized
from modicum.comparison.comparing import compare, settled
from modicum.core.errors import DoesNotFit, InputError
from modicum.planner import Plan
from modicum.planner.planning import plan
from modicum.recipe import Recipe


@pytest.fixture(autouse=True)
def no_known_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "FOLDER", str(tmp_path / "known-trials"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> QuickRuns:
    return QuickRuns(monkeypatch)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A recipe of a new model."""
    folder = tmp_path_factory.mktemp("recipe")
    rows = (json.dumps({"text": f"{n} cats and {n % 7} dogs"}) for n in range(120))
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    recipe = Recipe(
        model={"layers": 1, "width": 32, "heads": 2, "vocabulary_size": 280},
        data={"path": str(folder / "rows.jsonl"), "sequence_length": 16},
        training={"steps": 2, "batch_size": 4, "learning_rate": 1e-3},
        samples={"count": 0},
    )
    (folder / "new.yaml").write_text(recipe_yaml.dump(recipe))
    return str(folder / "new.yaml")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Optimizers for which there is no room at the moment, and what the refusal says of each."""
    found: dict[str, str] = {}

    def planned(recipe: Recipe, **how: Any) -> Plan:
        if recipe.optimizer["method"] in found:
            raise DoesNotFit(found[recipe.optimizer["method"]])
        return plan(recipe, **how)

    monkeypatch.setattr("modicum.planner.plan", planned)
    return found


def test_a_side_that_fits_by_now_or_no_longer_is_no_other_comparison(
    file: str, quick: QuickRuns, short: dict[str, str], tmp_path: Path
) -> None:
    def compared(folder: str) -> Any:
        vary = "optimizer=adamw,sgd,lion"
        return compare(file, tmp_path / folder, vary=vary, trials=1, seeds=2)

    short["lion"] = "does not fit: 412 MB are free"
    two = compared("two")
    assert two.side("lion").problem == "does not fit: 412 MB are free"
    often = len(quick.trained)
    short["lion"] = "does not fit: 413 MB are free"
    assert compared("two").to_json() == two.to_json()
    short.clear()
    assert compared("two").to_json() == two.to_json()
    assert len(quick.trained) == often
    three = compared("three")
    assert three.side("lion").frozen is not None
    short["lion"] = "does not fit: 414 MB are free"
    assert compared("three").to_json() == three.to_json()


def test_a_budget_in_bytes_keeps_the_sizes_that_it_began_with(
    file: str, quick: QuickRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask: dict[str, Any] = {"vary": "optimizer=galore,trion", "budget": "peak=700kB"}
    found = compare(file, tmp_path / "out", trials=1, seeds=2, **ask)
    begun = settled([file], folder=tmp_path / "out", **ask)

    def smallest(recipe: Recipe, budget: Any, path: str, sizes: Any, plan: Any) -> Sized:
        return Sized({path: sizes[0]}, 1)

    monkeypatch.setattr("modicum.comparison.side_sizes.sized", smallest)
    assert settled([file], **ask).fixed != begun.fixed
    again = settled([file], folder=tmp_path / "out", **ask)
    assert (again.fixed, again.unequal) == (begun.fixed, begun.unequal)
    resumed = compare(file, tmp_path / "out", trials=1, seeds=2, **ask)
    assert resumed.to_json() == found.to_json()


def test_a_side_without_room_at_its_size_stays_out_too(
    file: str, quick: QuickRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(recipe: Recipe, **how: Any) -> Plan:
        if recipe.optimizer["method"] == "galore" and "rank" in recipe.optimizer:
            raise DoesNotFit("does not fit: 412 MB are free")
        return plan(recipe, **how)

    ask: dict[str, Any] = {"vary": "optimizer=galore,trion,adamw", "budget": "peak=700kB"}
    with monkeypatch.context() as patched:
        patched.setattr("modicum.planner.plan", planned)
        row = settled([file], **ask).row()["sides"][0]
        assert row == {"side": "galore", "refused": "does not fit: 412 MB are free"}
        found = compare(file, tmp_path / "out", trials=1, seeds=2, **ask)
    resumed = compare(file, tmp_path / "out", trials=1, seeds=2, **ask)
    assert resumed.to_json() == found.to_json()


def test_another_recipe_of_a_side_that_stays_out_is_another_comparison(
    file: str, quick: QuickRuns, short: dict[str, str], tmp_path: Path
) -> None:
    recipe, files = recipe_yaml.load(file), []
    for name in ("adamw", "sgd", "lion"):
        files.append(str(tmp_path / f"{name}.yaml"))
        own = recipe.changed(optimizer={"method": name})
        Path(files[-1]).write_text(recipe_yaml.dump(own))
    short["lion"] = "does not fit: 412 MB are free"
    compare(files, tmp_path / "out", trials=1, seeds=2)
    short.clear()
    smaller = recipe.changed(optimizer={"method": "lion"}, training__batch_size=2)
    Path(files[-1]).write_text(recipe_yaml.dump(smaller))
    with pytest.raises(InputError, match=r"\(training\.batch_size: 4 there, 2 here \(lion\)\)"):
        compare(files, tmp_path / "out", trials=1, seeds=2)


@pytest.mark.parametrize("text", [None, "", "[]", '{"identity": {"protocol": {}}}'])
def test_what_is_no_comparison_yet_says_nothing(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "study.json").write_text(text)
    assert BegunComparison.of(tmp_path) == BegunComparison()
