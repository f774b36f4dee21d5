"""Runs that comparisons share: what one has trained, another takes, with its curve.

A run is known by all that decides its numbers: the resolved recipe, the bytes of every file that
the recipe names, modicum's sources, versions of libraries, threads, ranks and machine. What reads
something else, such as a data set of the hub or a method of another package, is trained in any
case. Times are never taken.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from modicum.comparison.cache import SharedTrials
from modicum.comparison.outcome import Outcome, Settings, TrialPart
from modicum.comparison.run_trials import RunTrials
from modicum.core.errors import InputError
from modicum.core.files import disk_errors, write_text
from modicum.core.weight_digests import remembered_digest
from modicum.recipe import Recipe
from modicum.trainer.folder import CURVE, METRICS, RunFolder

KNOWN = "known"  # the folder of curves of runs that were taken
_CURVE = "curve"
_LONGEST = 100_000  # updates; the curve of a longer run is not kept
_LIBRARIES = ("datasets", "numpy", "pyarrow", "safetensors", "tokenizers", "transformers")
_ELSEWHERE = ("hub:", "package:")
_CHANGING = ("lock", "report.html")  # of a run folder, what a look at it may write


class SharedRuns(SharedTrials):
    """The trial of `modicum compare`, which takes runs of other comparisons.

    A run that has begun in this comparison's folder ends there, whatever others have.

    Args:
        runs: makes the runs that are not known.
        fresh: make those that are known as well.
    """

    def __init__(self, runs: RunTrials, *, fresh: bool = False) -> None:
        super().__init__(runs, self._facts, metrics=None, fresh=fresh)
        self.runs = runs
        self._inputs = {side: input_digests(recipe) for side, recipe in runs.recipes.items()}

    def _facts(
        self, side: str, settings: Settings, seed: int, part: TrialPart
    ) -> Mapping[str, Any] | None:
        """All that decides a run's outcome; None where that is not known, or it is refused."""
        inputs = self._inputs[side]
        try:
            recipe = self.runs.recipe(side, settings, seed, part)
        except InputError:
            return None
        if inputs is None:
            return None
        return {
            "recipe": json.dumps(recipe.plain(), sort_keys=True, default=str),
            "inputs": sorted(inputs.items()),
            "libraries": _libraries(),
            "threads": self.runs.threads,
            "ranks": self.runs.ranks,
            "device": _device(recipe.training.device),
        }

    def begun(self, side: str, settings: Settings, seed: int, part: TrialPart) -> bool:
        """Whether the trial has a run here."""
        return self.runs.begun(side, settings, seed, part)

    def kept(self, outcome: Outcome) -> dict[str, Any]:
        """The outcome, and the curve of its run."""
        rows = RunFolder(Path(outcome.folder)).curve()
        lines = [json.dumps({name: row[name] for name in CURVE}) + "\n" for row in rows]
        return {**super().kept(outcome), _CURVE: "".join(lines if len(rows) <= _LONGEST else ())}

    def taken(self, values: Mapping[str, Any], name: str) -> Outcome:
        """The outcome that was kept; its curve is written into a folder of this comparison.

        Raises:
            InputError: it is none, or the curve cannot be written.
        """
        own = dict(values)
        curve = own.pop(_CURVE, "")
        folder = self.runs.folder / KNOWN / name
        outcome = super().taken({**own, "folder": str(folder) if curve else ""}, name)
        if curve:
            with disk_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / METRICS, curve)
        return outcome


def input_digests(recipe: Recipe) -> dict[str, str] | None:
    """Digests of the files and folders that a recipe with absolute paths names.

    None where it reads what they do not cover: a data set or model of the hub, methods that are not
    modicum's own, a table that names further files.

    >>> input_digests(Recipe(data={"path": "hub:openai/gsm8k"})) is None
    True
    """
    modules = [record.module or "" for record in recipe.methods().values()]
    if recipe.plugins or not all(module.startswith("modicum.") for module in modules):
        return None
    table = (recipe.task or {}).get("path")
    if isinstance(table, str) and not Path(table).is_dir():
        return None
    found = {}
    for text in _texts(recipe.plain()):
        if text.startswith(_ELSEWHERE) or "://" in text:
            return None
        if os.path.isabs(text):
            digest = _digest(Path(text))
            if digest is None:
                return None
            found[text] = digest
    return found


def _texts(value: Any) -> Iterator[str]:
    """All texts in plain values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _digest(path: Path) -> str | None:
    """Of a file's bytes, or of all files in a folder; None where they cannot be read."""
    try:
        if not path.is_dir():
            return remembered_digest(path)
        digest = hashlib.sha256()
        for folder, folders, names in os.walk(path):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            if any((Path(folder) / name).is_symlink() for name in folders):
                return None
            for name in sorted(names):
                if not name.startswith(".") and name not in _CHANGING:
                    file = Path(folder) / name
                    place = file.relative_to(path)
                    digest.update(f"{place}\0{remembered_digest(file)}\0".encode())
        return digest.hexdigest()
    except OSError:
        return None


@cache
def _libraries() -> str:
    """Versions of what runs compute and read with, next to torch."""
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return json.dumps(found)


def _device(asked: str) -> str:
    """What a run computes on."""
    import torch

    if asked == "cpu" or not torch.cuda.is_available():
        return "cpu"
    return torch.cuda.get_device_name()
