"""Reads a run folder as it is: files missing, still growing, or truncated in mid-line."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modicum.core.errors import InputError
from modicum.core.files import JsonObject, read_bytes
from modicum.core.run_folders import no_run
from modicum.recipe_yaml import parse
from modicum.report.columns import StepColumns
from modicum.report.lines import GrowingFile

FILES = (
    "recipe.yaml", "plan.jsonl", "metrics.jsonl", "evaluations.jsonl", "samples.jsonl", "run.json",
)  # fmt: skip


@dataclass(frozen=True)
class FolderContents:
    """What could be read of a run folder; `notes` says in sentences what could not."""

    path: Path
    run: JsonObject = field(default_factory=dict)
    recipe_text: str = ""
    recipe: JsonObject = field(default_factory=dict)
    plans: list[JsonObject] = field(default_factory=list)
    metrics: StepColumns = field(default_factory=StepColumns)
    evaluations: StepColumns = field(default_factory=StepColumns)
    samples: list[JsonObject] = field(default_factory=list)
    wire: list[JsonObject] = field(default_factory=list)
    findings: JsonObject = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The folder's own name, which is the run's."""
        return self.path.resolve().name


def section(row: Any, *names: str) -> JsonObject:
    """The mapping at `row[names[0]][names[1]]…`, empty when any of it is absent or no mapping."""
    for name in names:
        row = row.get(name) if isinstance(row, dict) else None
    return row if isinstance(row, dict) else {}


def listing(row: JsonObject, name: str) -> list[JsonObject]:
    """The mappings in the list `row[name]`; anything else in it is left out."""
    items = row.get(name)
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _text(path: Path) -> str | None:
    try:
        return read_bytes(path).decode("utf-8", "replace")
    except InputError:
        return None


def _note(file: GrowingFile, notes: list[str]) -> None:
    if file.damaged:
        lines = "1 line was" if file.damaged == 1 else f"{file.damaged} lines were"
        notes.append(f"{file.path.name}: {lines} truncated or damaged, and left out here.")


def _rows(path: Path, notes: list[str]) -> list[JsonObject]:
    """The JSON objects of a file with one a line; what is none is left out, and noted."""
    file = GrowingFile(path)
    rows = [row for some in file.more(unended=True) for row in some]
    _note(file, notes)
    return rows


def _columns(path: Path, notes: list[str]) -> StepColumns:
    """The numbers of such a file."""
    file, columns = GrowingFile(path), StepColumns()
    for some in file.more(unended=True):
        columns.extend(some)
    _note(file, notes)
    return columns


def _findings(path: Path) -> JsonObject:
    """What the last evaluation with findings has of them, with its step."""
    kept: JsonObject = {}
    for some in GrowingFile(path).more(unended=True):
        for row in some:
            if section(row, "findings"):
                kept = {"step": row.get("step"), **section(row, "findings")}
    return kept


def _recipe(text: str, notes: list[str]) -> JsonObject:
    try:
        recipe, _ = parse(text, "recipe.yaml")
    except InputError:
        notes.append("recipe.yaml: not readable as YAML; shown as it is.")
        return {}
    return recipe if isinstance(recipe, dict) else {}


def _run(path: Path, notes: list[str]) -> JsonObject:
    text = _text(path)
    if text is None:
        notes.append("run.json is missing: the run has not come far enough to write it.")
        return {}
    try:
        run = json.loads(text)
    except (ValueError, RecursionError):
        run = None
    if not isinstance(run, dict):
        notes.append("run.json is damaged, and left out here.")
        return {}
    return run


def checked(folder: str | Path) -> Path:
    """The path of a run folder.

    Raises:
        InputError: there is no such folder, or nothing in it that a run writes.
    """
    path = Path(folder)
    if not any((path / name).is_file() for name in FILES):
        raise no_run(path)
    return path


def read(
    folder: str | Path, metrics: StepColumns | None = None, evaluations: StepColumns | None = None
) -> FolderContents:
    """Read all that a run folder holds.

    Args:
        metrics: of `metrics.jsonl`, where somebody has read it already.
        evaluations: the same of `evaluations.jsonl`.

    Raises:
        InputError: there is no such folder, or nothing in it that a run writes.
    """
    path, notes = checked(folder), list[str]()
    recipe_text = _text(path / "recipe.yaml") or ""
    return FolderContents(
        path=path,
        run=_run(path / "run.json", notes),
        recipe_text=recipe_text,
        recipe=_recipe(recipe_text, notes),
        plans=_rows(path / "plan.jsonl", notes),
        metrics=_columns(path / "metrics.jsonl", notes) if metrics is None else metrics,
        evaluations=(
            _columns(path / "evaluations.jsonl", notes) if evaluations is None else evaluations
        ),
        samples=_rows(path / "samples.jsonl", notes),
        wire=_rows(path / "wire.jsonl", notes),
        findings=_findings(path / "evaluations.jsonl"),
        notes=notes,
    )
