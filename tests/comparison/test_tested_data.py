"""A test is of all sides or of none, and nothing in it is trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from quick_runs import QuickRuns

from modicum import recipe_yaml
from modicum.comparison import cache, tested_data
from modicum.comparison.comparing import compare, settled
from modicum.core.errors import InputError
from modicum.planner import Plan
from modicum.recipe import Recipe


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> QuickRuns:
    monkeypatch.setattr(cache, "FOLDER", str(tmp_path / "known-trials"))
    return QuickRuns(monkeypatch)


def rows(file: Path, first: int, last: int) -> str:
    """A file of so many rows; its name."""
    lines = (json.dumps({"text": f"{n} cats and {n % 7} dogs"}) for n in range(first, last))
    file.write_text("\n".join(lines) + "\n")
    return str(file)


def sides(folder: Path, tests: dict[str, str | None]) -> list[str]:
    """Recipes of these names that learn the same rows, at other rates, each with its test."""
    path, files = rows(folder / "rows.jsonl", 0, 120), []
    for number, (name, test) in enumerate(tests.items(), start=1):
        recipe = Recipe(
            model={"layers": 1, "width": 16, "heads": 2, "vocabulary_size": 280},
            data={"path": path, "sequence_length": 16} | ({"test_path": test} if test else {}),
            training={"steps": 2, "batch_size": 4, "learning_rate": 1e-3 * number},
            samples={"count": 0},
        )
        (folder / f"{name}.yaml").write_text(recipe_yaml.dump(recipe))
        files.append(str(folder / f"{name}.yaml"))
    return files


def test_a_test_that_some_sides_have_is_refused_before_anything_runs(
    quick: QuickRuns, tmp_path: Path
) -> None:
    outside = rows(tmp_path / "outside.jsonl", 200, 220)
    files = sides(tmp_path, {"one": None, "two": outside, "three": None})
    said = r"some sides hold data out for a test \(two\) and others do not \(one, three\)"
    with pytest.raises(InputError, match=said):
        compare(files, tmp_path / "out", trials=1, seeds=2)
    with pytest.raises(InputError, match=said):
        settled(files, budget="seconds=10")
    assert quick.trained == []


def test_each_side_s_test_is_looked_at_and_one_that_they_share_once(
    quick: QuickRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = rows(tmp_path / "outside.jsonl", 200, 220)
    inside = rows(tmp_path / "inside.jsonl", 110, 130)
    files = sides(tmp_path, {"one": outside, "two": outside, "three": inside})
    with pytest.raises(InputError, match=r"data\.test_path: \d+ of its 20 .* are trained on too"):
        compare(files, tmp_path / "out", trials=1, seeds=2)
    assert quick.trained == []
    refuse, looked_at = tested_data.refuse_trained_test, list[str | None]()

    def noted(plan: Plan) -> None:
        looked_at.append(plan.recipe.data.test_path)
        refuse(plan)

    monkeypatch.setattr(tested_data, "refuse_trained_test", noted)
    compare(files[:2], tmp_path / "out", trials=1, seeds=2)
    assert looked_at == [outside]
