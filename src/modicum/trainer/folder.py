"""The run folder: locked while in use, and readable by anybody with a text editor."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from modicum.core.errors import InputError
from modicum.core.files import disk_errors, write_json, write_text
from modicum.recipe import Recipe, differences

RECIPE, PLAN, RUN = "recipe.yaml", "plan.jsonl", "run.json"
METRICS, EVALUATIONS, SAMPLES = "metrics.jsonl", "evaluations.jsonl", "samples.jsonl"


class RunFolder:
    """A run's files under `path`; rows are appended whole, and cut back to a step on resume."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process.

        Raises:
            InputError: another process holds it, or it cannot be made or written.
        """
        with disk_errors(self.path):
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                handle = open(self.path / "lock", "a+", encoding="utf-8")
            except (FileExistsError, NotADirectoryError):
                raise InputError("a run needs a folder, and this is a file", file=self.path) from None
        with handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                handle.seek(0)
                holder = handle.read().strip() or "another process"
                raise InputError(
                    f"this run is in use by {holder}; wait for it, stop it, or give another --out",
                    file=self.path,
                ) from None
            handle.truncate(0)
            handle.write(f"process {os.getpid()}")
            handle.flush()
            yield

    # The recipe

    def started(self) -> bool:
        """Whether a run was begun here."""
        return (self.path / RECIPE).exists()

    def refuse_strangers(self) -> None:
        """Refuse a folder that holds something, and no run.

        Raises:
            InputError: so it is.
        """
        others = [p.name for p in self.path.glob("*") if p.name != "lock" and p.name[0] != "."]
        if others and not self.started():
            raise InputError(
                f"holds other files ({sorted(others)[0]}) and no run; give --out a new folder",
                file=self.path,
            )

    def read_recipe(self) -> Recipe:
        """The recipe that the run was begun with (or last extended to)."""
        from modicum.recipe_yaml import parse

        values, _ = parse((self.path / RECIPE).read_text(encoding="utf-8"), self.path / RECIPE)
        return Recipe(**_whole(values))

    def write_recipe(self, recipe: Recipe) -> None:
        """Keep the recipe, every field spelled out."""
        from modicum.recipe_yaml import dump

        write_text(self.path / RECIPE, dump(recipe))

    def check_same(self, recipe: Recipe) -> bool:
        """Whether `recipe` continues this run; True when it extends it by more steps.

        Raises:
            InputError: it is another recipe, with the differences.
        """
        old, new = self.read_recipe().plain(), recipe.plain()
        changes = differences(old, new)
        if not changes:
            return False
        before, after = old["training"]["steps"], new["training"]["steps"]
        if len(changes) == 1 and changes[0].startswith("training.steps:") and after > before:
            return True
        raise InputError(
            "this run was begun with another recipe; to go on give that one (only training.steps "
            "may grow), to start a new run from its state give --out a new folder and --fork this "
            "one. Changed: " + "; ".join(changes),
            file=self.path,
        )

    # Rows

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Add a row to a .jsonl file."""
        with disk_errors(self.path), open(self.path / name, "a", encoding="utf-8") as handle:
            handle.write(json.dumps(row, ensure_ascii=False) + "\n")

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The whole rows of a .jsonl file; a last one that was cut off is left out."""
        path = self.path / name
        if not path.exists():
            return []
        rows = []
        for line in path.read_bytes().split(b"\n"):
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
        return [row for row in rows if isinstance(row, dict)]

    def cut_back(self, step: int) -> None:
        """Forget rows of steps after `step`, which will be done again."""
        for name in (METRICS, EVALUATIONS, SAMPLES):
            if (self.path / name).exists():
                kept = [row for row in self.rows(name) if row["step"] <= step]
                lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in kept)
                write_text(self.path / name, "".join(lines))

    # The record

    def read_record(self) -> dict[str, Any]:
        """`run.json`, or an empty record."""
        try:
            record = json.loads((self.path / RUN).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    def write_record(self, record: dict[str, Any]) -> None:
        """Write `run.json`, whole."""
        write_json(self.path / RUN, record)


def _whole(values: dict[str, Any]) -> dict[str, Any]:
    """A spelled-out recipe as one may write it: a model from a path has no shape of its own."""
    model = values.get("model", {})
    if model.get("path") is not None:
        values["model"] = {key: model[key] for key in ("path", "linear") if key in model}
    return values
