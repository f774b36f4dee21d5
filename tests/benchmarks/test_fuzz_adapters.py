"""The fuzzer of adapters' folders: a short form of it, and that it finds what is wrong."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modicum.adapters import files
from modicum.recipe import methods_for

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(ROOT / "benchmarks")
        names = ("adapters", "tensors", "world")
        found = {name: importlib.import_module(f"fuzz_{name}") for name in names}
        work = tmp_path_factory.mktemp("fuzz")
        yield SimpleNamespace(**found, fuzzer=found["adapters"].Fuzzer(work, 7))


@pytest.mark.expensive
def test_every_method_and_format_is_there_and_loads(fuzz: Any) -> None:
    folders = {(folder.name, folder.form): folder for folder in fuzz.fuzzer.folders}
    known = set(methods_for("adapter"))
    assert {name for name, form in folders if form == "modicum"} >= known
    assert {"lora", "dora", "randlora-rank"} <= {name for name, form in folders if form == "peft"}
    for folder in folders.values():
        assert fuzz.fuzzer.tried(folder.path) == ("loaded", [])


@pytest.mark.expensive
def test_spoilt_folders_are_loaded_as_they_say_or_refused(fuzz: Any) -> None:
    ends = []
    for number in range(60):
        folder, how, ended, wrong = fuzz.fuzzer.do(number)
        assert wrong == [], f"{number}: {folder.path.name}: {how}: {ended}"
        ends.append(ended == "loaded")
    assert 0 < sum(ends) < len(ends)


def test_a_number_spoils_alike(fuzz: Any, tmp_path: Path) -> None:
    said, left = [], []
    for number in range(40):
        for copy in ("one", "other"):
            folder = tmp_path / f"{number}-{copy}"
            folder.mkdir()
            for file in fuzz.fuzzer.folders[0].path.iterdir():
                (folder / file.name).write_bytes(file.read_bytes())
            said.append(fuzz.tensors.spoil(Random(number), folder))
            readable = (p for p in sorted(folder.iterdir()) if p.is_file() and p.suffix != ".x")
            left.append({p.name: p.read_bytes() for p in readable if not p.is_symlink()})
    assert said[::2] == said[1::2]
    assert left[::2] == left[1::2]
    assert len(set(said)) > 25


class Broken(Exception):
    """What no folder should make anybody see."""


@pytest.mark.parametrize("fault", ["another exception", "another model", "other numbers"])
def test_what_is_wrong_is_found(
    fuzz: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    [folder] = [f for f in fuzz.fuzzer.folders if f.path.name == "lora-modicum"]
    put = files._put

    def broken(attached: Any, state: dict[str, torch.Tensor], base: Mapping[str, Any]) -> None:
        if fault == "another exception":
            raise Broken("1 of 2")
        put(attached, state, dict(base))
        if fault == "other numbers":
            next(attached.parameters()).data.add_(1.0)
        else:
            attached.model.get_submodule("model.norm").weight.data.add_(1.0)

    monkeypatch.setattr(files, "_put", broken)
    _, wrong = fuzz.fuzzer.tried(folder.path)
    expected = {
        "another exception": "files.py _attached: Broken: 0 of 0",
        "another model": "detached, and its tensors differ",
        "other numbers": "loaded, and its numbers are not those of the file",
    }[fault]
    assert expected in wrong
