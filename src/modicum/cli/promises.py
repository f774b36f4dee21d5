"""`modicum promises`: what the README promises, measured on this machine.

A promise is a sentence, a command that anyone can run in a checkout, which of the command's
figures counts, and the bar for it. Commands run one after the other from the file's own folder;
those that take many minutes run only when they are asked for, and otherwise the result that they
wrote last is read, with its date.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from modicum.cli.places import check_file
from modicum.cli.promises_file import FigurePlace, Promise, read_promises
from modicum.cli.promises_table import PAGE, shown, with_chosen, with_table, with_unit
from modicum.core.errors import InputError
from modicum.core.files import JsonObject, read_json, read_text, write_json, write_text
from modicum.core.units import format_duration

RESULTS = Path("benchmarks") / "results" / "promises.json"


def run_promises(file: Path, only: Sequence[str] = (), *, long: bool = False) -> list[JsonObject]:
    """Check promises, keep their rows in benchmarks/results/promises.json, and show them.

    Commands run, but for the long ones, whose results are read from the files that an earlier run
    of theirs wrote and somebody committed.

    README and docs/reference/promises.md next to the file get their tables anew, where they have a
    place for one. Rows of promises that are not checked this time stay as they were.

    Args:
        file: the promises.
        only: ids; all without any.
        long: run the long commands too.

    Returns:
        The rows of the promises that were checked: `id`, `sentence`, `command`, `figure`, `unit`,
        `bar`, `kept`, `read` (not run), `machine` and `when` (of the measurement; None without
        one), and where there is no figure, the `problem`.

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
    check_file(root / RESULTS)
    outcomes: dict[str, _Outcome | None] = {}
    rows = []
    for promise in chosen:
        if promise.command not in outcomes:
            outcomes[promise.command] = _outcome(promise, root, long)
        outcome = outcomes[promise.command]
        if outcome is None:
            rows.append(_read_row(promise, root))
        else:
            rows.append(_row(promise, outcome, root, machine))
        print(_told(rows[-1]), flush=True)
        _keep(rows, promises, root)
    return rows


def _outcome(promise: Promise, root: Path, long: bool) -> _Outcome | None:
    """What the promise's command does; None when it is not run."""
    if promise.long and not long:
        print(
            f"$ {promise.command}  # about {promise.takes}: its committed result is read, "
            "--long runs it",
            file=sys.stderr,
            flush=True,
        )
        return None
    return _Outcome.of(promise.command, root)


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
                _words(command),
                cwd=root,
                env=environment,
                stdout=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                check=False,
            )
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            return cls(started, "", f"the command could not be run: {why}")
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
            # Some file systems round times to seconds.
            if not path.exists() or path.stat().st_mtime < int(self.started):
                raise ValueError(f"the command did not write {place.file}")
            text = _text(path)
        return figure_at(_parsed(text, place), place)


def _text(path: Path) -> str:
    """The text of a file that a command wrote.

    Raises:
        ValueError: it cannot be read, or is no regular file.
    """
    try:
        return read_text(path)
    except InputError as error:
        raise ValueError(str(error)) from None


def _words(command: str) -> list[str]:
    """The words of a command.

    Raises:
        ValueError: there are none, or a quote is not closed.
    """
    words = shlex.split(command)
    if not words:
        raise ValueError("it has no words")
    return words


def _row(promise: Promise, outcome: _Outcome, root: Path, machine: str) -> JsonObject:
    figure, problem = None, None
    try:
        figure = outcome.figure(promise.figure, root)
    except ValueError as error:
        problem = str(error)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return _as_row(promise, figure, problem, read=False, machine=machine, when=when)


def _read_row(promise: Promise, root: Path) -> JsonObject:
    """The row of a promise whose command is not run: its figure is the committed result's."""
    place = promise.figure
    figure = machine = when = problem = None
    try:
        if not (root / str(place.file)).exists():
            raise ValueError(f"not measured yet: there is no {place.file}")
        text = _text(root / str(place.file))
        content = _parsed(text, place)
        figure = figure_at(content, place)
        machine, when = _measured_on(content), content.get("when")
        if not isinstance(when, str):
            figure = machine = when = None
            problem = f"{place.file} has no date: no `when` in it"
    except ValueError as error:
        problem = str(error)
    return _as_row(promise, figure, problem, read=True, machine=machine, when=when)


def _as_row(
    promise: Promise,
    figure: object,
    problem: str | None,
    *,
    read: bool,
    machine: str | None,
    when: str | None,
) -> JsonObject:
    row: JsonObject = {
        "id": promise.id,
        "sentence": promise.sentence,
        "command": promise.command,
        "figure": figure,
        "unit": promise.unit,
        "bar": promise.bar,
        "kept": promise.kept(figure),
        "read": read,
        "machine": machine,
        "when": when,
    }
    return row if problem is None else row | {"problem": problem}


def _parsed(text: str, place: FigurePlace) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise ValueError(f"no JSON in {place.file or 'the output'}") from None


def figure_at(value: Any, place: FigurePlace) -> object:
    """The figure under the place's key; of a list of rows it names one by its sentence or name.

    Raises:
        ValueError: there is none.
    """
    for part in place.key.split("."):
        if isinstance(value, list):
            value = {row.get("sentence", row.get("name")): row for row in _rows_of(value)}
        if not isinstance(value, dict) or part not in value:
            raise ValueError(f"no {place.key} in {place.file or 'the output'}")
        value = value[part]
    return value


def _rows_of(values: list[Any]) -> list[JsonObject]:
    return [value for value in values if isinstance(value, dict)]


def _measured_on(content: Mapping[str, Any]) -> str | None:
    """The machine that a result says it is from."""
    machine = content.get("machine")
    if not isinstance(machine, Mapping) or not {"processor", "cores"} <= machine.keys():
        return None
    return _machine_in_words(machine["processor"], machine["cores"])


def _keep(rows: Iterable[JsonObject], promises: Sequence[Promise], root: Path) -> None:
    """Replace older rows of the same promises, in the file's order, also in the tables."""
    path = root / RESULTS
    known = {row["id"]: row for row in read_rows(path)} | {row["id"]: row for row in rows}
    merged = [known[promise.id] for promise in promises if promise.id in known]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, merged)
    write_tables(merged, promises, root)


def write_tables(rows: Sequence[JsonObject], promises: Sequence[Promise], root: Path) -> None:
    """Write the table of a checkout's README, and that of its page of all promises."""
    chosen = {promise.id: promise.readme for promise in promises if promise.readme}
    for file in (root / "README.md", root / PAGE):
        if not file.is_file():
            continue
        text = read_text(file)
        new = with_table(text, rows) if file == root / PAGE else with_chosen(text, rows, chosen)
        if new != text:
            write_text(file, new)


def read_rows(path: Path) -> list[JsonObject]:
    """The rows of a promises.json; none where there is none."""
    try:
        rows = read_json(path)
    except InputError:
        return []
    return [row for row in rows if "id" in row] if isinstance(rows, list) else []


def _told(row: JsonObject) -> str:
    mark = "kept" if row["kept"] else "NOT KEPT"
    return f"{mark:8}  {row['id']}: {shown(row)} (bar {with_unit(row['bar'], row)})"


def _machine() -> str:
    import torch

    from modicum.core.machine import this_machine

    machine = this_machine(torch.device("cpu"))
    return _machine_in_words(machine.processor, machine.cores)


def _machine_in_words(processor: str, cores: int) -> str:
    return f"{processor}, {cores} core{'s' if cores > 1 else ''}"
