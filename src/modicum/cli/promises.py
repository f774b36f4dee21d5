"""`modicum promises`: what the README promises, measured on this machine.

A promise is a sentence, a command that anyone can run in a checkout, which of the command's
figures counts, and the bar for it. Commands run one after the other from the file's own folder.
"""

from __future__ import annotations

import json
import operator
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from modicum.cli.readme import between
from modicum.core.errors import InputError
from modicum.core.files import write_json, write_text
from modicum.core.method import describe
from modicum.core.units import format_duration

RESULTS = Path("benchmarks") / "results" / "promises.json"
BEGIN, END = "<!-- promises:begin -->", "<!-- promises:end -->"
BAR_FORMAT = "a relation and a value: '< 0.3', '>= 0.98', '== 0', '== holds'"
_RELATIONS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
}
Row = dict[str, Any]


class FigurePlace(BaseModel):
    """Where a command leaves a figure: a dotted key of the JSON in a file, or on its output."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    key: str
    file: str | None = None


class Promise(BaseModel):
    """One promise, as the file spells it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: str
    sentence: str
    command: str
    figure: FigurePlace
    bar: str
    unit: str = ""

    @field_validator("bar")
    @classmethod
    def _readable(cls, bar: str) -> str:
        relation, _, value = bar.partition(" ")
        if relation not in _RELATIONS or not value:
            raise ValueError(f"not a bar; write {BAR_FORMAT}")
        return bar

    def kept(self, figure: object) -> bool:
        """Whether the figure clears the bar; one of another type than the bar's never does."""
        relation, _, text = self.bar.partition(" ")
        try:
            bar: object = float(text)
        except ValueError:
            bar = text
        numeric = isinstance(figure, int | float) and not isinstance(figure, bool)
        if numeric != isinstance(bar, float):
            return False
        return _RELATIONS[relation](figure, bar)


def read_promises(file: Path) -> list[Promise]:
    """The promises of a file, in its order.

    Raises:
        InputError: it is missing or no list of promises, with what is wrong in which.
    """
    try:
        entries = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            "there is no such file; promises are checked in a checkout of modicum", file=file
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"this is not YAML: {error}", file=file) from None
    if not isinstance(entries, list):
        raise InputError("expected a list of promises", file=file)
    promises = []
    for number, entry in enumerate(entries, start=1):
        try:
            promises.append(Promise.model_validate(entry))
        except ValidationError as error:
            known = Promise.model_fields
            raise describe(error, known, prefix=f"promise {number}: ", file=file) from None
    ids = [promise.id for promise in promises]
    for promise in promises:
        if ids.count(promise.id) > 1:
            raise InputError("two promises have this id", file=file, field="id", value=promise.id)
    return promises


def run_promises(file: Path, only: Sequence[str] = ()) -> list[Row]:
    """Check promises, keep their rows in benchmarks/results/promises.json, and show them.

    The README beside the file gets its table anew, where it has a place for one. Rows of promises
    that are not checked this time stay as they were.

    Args:
        file: the promises.
        only: ids; all without any.

    Returns:
        The rows of the promises that were checked: `id`, `sentence`, `command`, `figure`, `unit`,
        `bar`, `kept`, `machine`, `when`, and where there is no figure, the `problem`.

    Raises:
        InputError: the file is wrong, or an id is unknown.
    """
    promises = read_promises(file)
    ids = [promise.id for promise in promises]
    for wanted in only:
        if wanted not in ids:
            allowed = ", ".join(ids)
            raise InputError(
                "no such promise", file=file, value=wanted, allowed=allowed, candidates=ids
            )
    chosen = [promise for promise in promises if not only or promise.id in only]
    root, machine = file.resolve().parent, _machine()
    outcomes: dict[str, _Outcome] = {}
    rows = []
    for promise in chosen:
        if promise.command not in outcomes:
            outcomes[promise.command] = _Outcome.of(promise.command, root)
        rows.append(_row(promise, outcomes[promise.command], root, machine))
        print(_told(rows[-1]), flush=True)
        _keep(rows, ids, root)
    return rows


class _Outcome:
    """What a command did: when it began, what it printed, and why it failed, if it did."""

    def __init__(self, started: float, output: str, problem: str | None) -> None:
        self.started, self.output, self.problem = started, output, problem

    @classmethod
    def of(cls, command: str, root: Path) -> _Outcome:
        """Run a command; its messages go to the terminal, its output is kept."""
        # `python` and `modicum` are those of this environment, whether it is activated or not.
        here = str(Path(sys.executable).parent)
        environment = {**os.environ, "PATH": here + os.pathsep + os.environ.get("PATH", "")}
        print(f"$ {command}", file=sys.stderr, flush=True)
        started, clock = time.time(), time.perf_counter()
        try:
            done = subprocess.run(
                shlex.split(command),
                cwd=root,
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
                check=False,
            )
        except OSError as error:
            return cls(started, "", f"the command could not be run: {error.strerror}")
        took = format_duration(time.perf_counter() - clock)
        print(f"  ({took})", file=sys.stderr, flush=True)
        code = done.returncode
        return cls(
            started, done.stdout, f"the command ended with exit code {code}" if code else None
        )

    def figure(self, place: FigurePlace, root: Path) -> object:
        """The figure in that place.

        Raises:
            ValueError: there is none, or it is from an earlier run.
        """
        if self.problem is not None:
            raise ValueError(self.problem)
        text = self.output
        if place.file is not None:
            path = root / place.file
            # Some file systems keep whole seconds only.
            if not path.exists() or path.stat().st_mtime < int(self.started):
                raise ValueError(f"the command did not write {place.file}")
            text = path.read_text(encoding="utf-8")
        try:
            value = json.loads(text)
        except ValueError:
            raise ValueError(f"no JSON in {place.file or 'the output'}") from None
        for part in place.key.split("."):
            if not isinstance(value, dict) or part not in value:
                raise ValueError(f"no {place.key} in {place.file or 'the output'}")
            value = value[part]
        return value


def _row(promise: Promise, outcome: _Outcome, root: Path, machine: str) -> Row:
    figure, problem = None, None
    try:
        figure = outcome.figure(promise.figure, root)
    except ValueError as error:
        problem = str(error)
    row: Row = {
        "id": promise.id,
        "sentence": promise.sentence,
        "command": promise.command,
        "figure": figure,
        "unit": promise.unit,
        "bar": promise.bar,
        "kept": promise.kept(figure),
        "machine": machine,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return row if problem is None else row | {"problem": problem}


def _keep(rows: Iterable[Row], ids: Sequence[str], root: Path) -> None:
    """Put rows in the place of older ones of theirs, in the file's order, and into the README."""
    path = root / RESULTS
    known = {row["id"]: row for row in read_rows(path)} | {row["id"]: row for row in rows}
    merged = [known[name] for name in ids if name in known]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, merged)
    readme = root / "README.md"
    if readme.exists():
        text = readme.read_text(encoding="utf-8")
        renewed = with_table(text, merged)
        if renewed != text:
            write_text(readme, renewed)


def read_rows(path: Path) -> list[Row]:
    """The rows of a promises.json; none where there is none."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [row for row in rows if "id" in row] if isinstance(rows, list) else []


def with_table(readme: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The README's text with the table of `rows` between its two markers; as it is without them."""
    return between(readme, BEGIN, END, markdown(rows))


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a Markdown table, with the machines that they were measured on beneath it."""
    if not rows:
        return ""
    lines = ["| promise | bar | measured | kept |", "| --- | --- | --- | --- |"]
    for row in rows:
        cells = (row["sentence"], _with_unit(row["bar"], row), _shown(row), _mark(row))
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    machines = dict.fromkeys(f"{row['machine']}, {row['when'][:10]}" for row in rows)
    return "\n".join([*lines, "", f"Measured on: {'; '.join(machines)}.", ""])


def _told(row: Row) -> str:
    found = row.get("problem") or _shown(row)
    mark = "kept" if row["kept"] else "NOT KEPT"
    return f"{mark:8}  {row['id']}: {found} (bar {_with_unit(row['bar'], row)})"


def _mark(row: Mapping[str, Any]) -> str:
    return "yes" if row["kept"] else "**no**"


def _shown(row: Mapping[str, Any]) -> str:
    figure = row["figure"]
    if isinstance(figure, float):
        figure = f"{figure:.3g}"
    return "–" if figure is None else _with_unit(str(figure), row)


def _with_unit(text: str, row: Mapping[str, Any]) -> str:
    return f"{text} {row['unit']}".rstrip()


def _machine() -> str:
    import torch

    from modicum.core.machine import this_machine

    machine = this_machine(torch.device("cpu"))
    return f"{machine.processor}, {machine.cores} core{'s' if machine.cores > 1 else ''}"
