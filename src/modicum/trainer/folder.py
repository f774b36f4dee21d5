"""The run folder: locked while in use, and readable by anybody with a text editor."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modicum.core.errors import InputError
from modicum.core.files import disk_errors, remove, write_json, write_text
from modicum.core.folder_lock import LOCK, locked_folder
from modicum.models.hub_models import PREFIX, commit_of
from modicum.recipe import Recipe, differences
from modicum.recipe.auto_exchange import is_auto
from modicum.recipe.paths import anchored
from modicum.recipe.training import LENGTHS
from modicum.trainer.contents import (
    Types,
    check_kinds,
    damaged_record,
    fits,
    read_object,
    read_rows,
)

if TYPE_CHECKING:
    from modicum.core.ranks.ranks import Ranks

RECIPE, PLAN, RUN = "recipe.yaml", "plan.jsonl", "run.json"
BASE = "base"  # the model that a run began with, where it made that itself
DATA = "data"  # as it was prepared
OFFERED = ".offered-data"  # prepared for another run; it is taken if it is what this one would make
PREPARED = "prepared"  # what its adapter found out from data before the first update
START = "start"  # a copy of the adapter that training starts from
METRICS, EVALUATIONS, SAMPLES = "metrics.jsonl", "evaluations.jsonl", "samples.jsonl"
CURVE = ("step", "loss", "tokens")  # of a row of metrics, what training is drawn by
ANOMALIES = "anomalies.jsonl"  # what the watchdog of its ranks found
WIRE = "wire.jsonl"  # calls of some updates, of several ranks
_BY_STEP = (METRICS, EVALUATIONS, SAMPLES, WIRE)
# In the order in which a run is removed: while its record is there, the others are no stranger's.
_OUTPUTS = ("model", "adapter", "compressed")
_FOLDERS = (
    *_OUTPUTS,
    "checkpoints",
    DATA,
    "tokenizer",
    BASE,
    PREPARED,
    START,
    "tensorboard",
    "wandb",
)
_FILES = ("report.html", "tracking.json", ANOMALIES, PLAN, *_BY_STEP, RECIPE, RUN)
_NUMBER = (int, float)
_ROWS: dict[str, Types] = {
    PLAN: {"revision": int, "why": str, "choices": list},
    METRICS: {"step": int, "loss": (*_NUMBER, type(None)), "tokens": _NUMBER, "seconds": _NUMBER},
    EVALUATIONS: {"step": int, "loss": (*_NUMBER, type(None))},
    SAMPLES: {"step": int},
    WIRE: {"step": int, "every": int, "calls": list, "so_far": dict},
}
_RECORD: Types = {
    **dict.fromkeys(("seconds", "steps", "tokens", "interruptions"), _NUMBER),
    **dict.fromkeys(("peak_bytes", "final", "outputs"), dict),
    "directory": str,
}
_PEAKS: Types = dict.fromkeys(("measured", "process"), (*_NUMBER, type(None)))
# What may be another at each start of a run: nothing of it changes what is computed.
_OF_A_START = (
    "parallel.",
    "checkpoint.asynchronous:",
    "tracking.",
    "export.",
    "cost.",
    "watchdog.",
    "watchdog:",
)


class RunFolder:
    """A run's files under `path`; rows are appended atomically, later ones removed on resume."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def of(path: Path, ranks: Ranks) -> RunFolder:
        """The folder as rank 0 has it, or as the others see it."""
        return RunFolder(path) if ranks.first else Onlooker(path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process.

        Raises:
            InputError: another process holds it, or it cannot be made or written.
        """
        with disk_errors(self.path):
            check_kinds(self.path, (LOCK,), ())
        with locked_folder(self.path, "run"):
            self._mend()
            yield

    def _mend(self) -> None:
        """Undo what a process left half done: a row that was truncated, a file not yet renamed.

        Raises:
            InputError: what is there is no run as it was written.
        """
        for left in self.path.glob(".*.part"):
            if left.is_file():
                left.unlink()
        if not self.started():
            return
        for name in (PLAN, *_BY_STEP):
            path, rows = self.path / name, self.rows(name)
            if path.is_file() and not path.read_bytes().endswith(b"\n"):
                self.replace_rows(name, rows)

    # The recipe

    def started(self) -> bool:
        """Whether a run was begun here: its record is written first, then its recipe.

        Raises:
            InputError: so it was, and what it left is not as it was written.
        """
        if not (self.path / RECIPE).exists() or not self.read_record():
            return False
        check_kinds(self.path, _FILES, _FOLDERS)
        return True

    def may_begin(self, recipe: Recipe) -> bool:
        """Whether `recipe` begins a run here: there is none, or another's that made no step."""
        if not self.started():
            return True
        if self.rows(METRICS) or any(self.path.glob("checkpoints/step-*")):
            return False
        return bool(_changes(*self._compared(recipe)))

    def clear(self) -> None:
        """Remove a run and all that it has left.

        A process that dies over it leaves a run that has not finished.
        """
        if record := self.read_record():
            self.write_record(record | {"status": "interrupted", "outputs": {}})
        for name in (*_FOLDERS, *_FILES):
            remove(self.path / name)

    def held(self) -> list[str]:
        """What of a run is here that another would replace, in words."""
        held = []
        for name in (METRICS, EVALUATIONS, SAMPLES):
            if (self.path / name).is_file():
                count = (self.path / name).read_bytes().count(b"\n")
                held.append(f"{name} ({count} line{'s' if count != 1 else ''})")
        steps = sorted(path.name for path in self.path.glob("checkpoints/step-*"))
        outputs = [f"{name}/" for name in _OUTPUTS if (self.path / name).exists()]
        return [*held, *steps, *outputs]

    def refuse_strangers(self) -> None:
        """Refuse a folder that holds something, and no run.

        Raises:
            InputError: so it is.
        """
        own = {"lock", RUN} if self.read_record() else {"lock"}
        others = {path.name for path in self.path.glob("[!.]*")} - own
        if others and not self.started():
            raise InputError(
                f"holds other files ({min(others)}) and no run; give --out a new folder",
                file=self.path,
            )

    def take_offered(self) -> None:
        """Take prepared data that was laid here for the run, unless it has its own."""
        offered, own = self.path / OFFERED, self.path / DATA
        if offered.is_dir() and not own.exists():
            offered.rename(own)
        remove(offered)

    def read_recipe(self) -> Recipe:
        """The recipe that the run was begun with (or last extended to)."""
        from modicum.recipe_yaml import parse, text_of

        path = self.path / RECIPE
        values, _ = parse(text_of(path), path)
        try:
            return Recipe(**anchored(values, self.directory()))
        except InputError as error:
            raise error.located(file=path) from None

    def directory(self) -> Path:
        """What relative paths in the run's recipe mean: they are of where the run was begun."""
        return Path(self.read_record().get("directory") or Path.cwd())

    def as_begun(self, recipe: Recipe, *, exchange: bool = True) -> Recipe:
        """The recipe with what the run that is here has settled, where it leaves that open.

        That is the precision, the form of frozen weights, how ranks exchange, the fields of the
        adapter that training started from, and the commit of a model of the hub.

        Args:
            exchange: whether how ranks exchange is among it.
        """
        start, path = recipe.model.adapter, recipe.model.path or ""
        open_exchange = exchange and is_auto("comm", recipe.comm)
        settled = recipe.training.precision != "auto" and start is None and not open_exchange
        if (settled and not path.startswith(PREFIX)) or not self.started():
            return recipe
        run = self.read_recipe()
        if commit_of(path, run.model.path or ""):
            recipe = recipe.changed(model__path=run.model.path)
        if open_exchange:
            recipe = recipe.changed(comm=run.comm)
        if recipe.training.precision == "auto":
            recipe = recipe.changed(
                training__precision=run.training.precision, linear=recipe.linear or run.linear
            )
        if start is not None and start == run.model.adapter:
            recipe = recipe.changed(adapter={**(run.adapter or {}), **(recipe.adapter or {})})
        return recipe

    def _compared(self, recipe: Recipe) -> tuple[dict[str, Any], dict[str, Any]]:
        """The run's recipe and another, as plain values that can be compared."""
        anchored = self.as_begun(recipe.anchored(self.directory()))
        return self.read_recipe().plain(), anchored.plain()

    def write_recipe(self, recipe: Recipe) -> None:
        """Keep the recipe, every field spelled out."""
        from modicum.recipe_yaml import dump

        write_text(self.path / RECIPE, dump(recipe))

    def check_same(self, recipe: Recipe) -> bool:
        """Whether `recipe` continues this run; True when it makes this one longer.

        Raises:
            InputError: it is another recipe, with the differences.
        """
        old, new = self._compared(recipe)
        changes = _changes(old, new)
        if not changes:
            return False
        for length in LENGTHS:
            before, after = old["training"].get(length), new["training"][length]
            alone = len(changes) == 1 and changes[0].startswith(f"training.{length}:")
            if alone and before and after and after > before:
                return True
        raise InputError(
            "this run was begun with another recipe; to resume, give that one (only "
            "training.steps, training.epochs or training.tokens may grow), to start a new run "
            "from its state give --out a new folder and --fork this one. Changed: "
            + "; ".join(changes),
            file=self.path,
        )

    def has_finished(self, recipe: Recipe) -> bool:
        """Whether the run of this recipe came to its end here, so that nothing is left to do.

        Raises:
            InputError: another recipe's did, with the differences.
        """
        finished = self.started() and self.read_record().get("status") == "finished"
        return finished and not self.check_same(recipe)

    # Rows

    def append(self, name: str, *rows: dict[str, Any]) -> None:
        """Add rows to a .jsonl file, in one write."""
        with disk_errors(self.path), open(self.path / name, "a", encoding="utf-8") as handle:
            handle.write(_lines(rows))

    def replace_rows(self, name: str, rows: Iterable[dict[str, Any]]) -> None:
        """Let a .jsonl file hold these rows and no others, atomically."""
        write_text(self.path / name, _lines(rows))

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The complete rows of a .jsonl file; a truncated last one is left out.

        Raises:
            InputError: another line is no row.
        """
        path = self.path / name
        return read_rows(path, _ROWS[name]) if path.exists() else []

    def curve(self) -> list[dict[str, Any]]:
        """Step, loss and tokens of every update, also where no times of them are known.

        Raises:
            InputError: a line is no such row.
        """
        types = {name: kind for name, kind in _ROWS[METRICS].items() if name in CURVE}
        path = self.path / METRICS
        return read_rows(path, types) if path.exists() else []

    def cut_back(self, step: int) -> None:
        """Forget rows of steps after `step`, which will be done again, and later changes of plan.

        These are surgeries, and methods that have ended.
        """
        for name in _BY_STEP:
            if (self.path / name).exists():
                self.replace_rows(name, (row for row in self.rows(name) if row["step"] <= step))
        plans = self.rows(PLAN)
        kept = [row for row in plans if changed_at(row) <= step]
        if len(kept) < len(plans):
            self.replace_rows(PLAN, kept)

    # The record

    def read_record(self) -> dict[str, Any]:
        """`run.json`, or an empty record where there is none of ours.

        Raises:
            InputError: it is damaged, and a run's recipe is next to it.
        """
        path = self.path / RUN
        if not path.exists():
            return {}
        begun = (self.path / RECIPE).exists()
        if begun:
            check_kinds(self.path, (RUN,), ())
        record = read_object(path, _RECORD) if path.is_file() else None
        if begun and (record is None or not fits(record.get("peak_bytes", {}), _PEAKS)):
            raise damaged_record(path)
        return record if record and "modicum" in record else {}

    def write_record(self, record: dict[str, Any]) -> None:
        """Write `run.json` atomically."""
        write_json(self.path / RUN, record)


class Onlooker(RunFolder):
    """The folder as ranks other than 0 see it: rank 0 writes, and tells them what it reads."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Rank 0 holds the folder for all."""
        yield

    def write_recipe(self, recipe: Recipe) -> None:
        """Rank 0 does."""

    def append(self, name: str, *rows: dict[str, Any]) -> None:
        """Rank 0 does."""

    def replace_rows(self, name: str, rows: Iterable[dict[str, Any]]) -> None:
        """Rank 0 does."""

    def take_offered(self) -> None:
        """Rank 0 does."""

    def rows(self, name: str) -> list[dict[str, Any]]:
        """None: what rank 0 writes might be there already, or not yet."""
        return []

    def cut_back(self, step: int) -> None:
        """Rank 0 does."""

    def read_record(self) -> dict[str, Any]:
        """None: as with rows."""
        return {}

    def write_record(self, record: dict[str, Any]) -> None:
        """Rank 0 does."""


def operated_at(row: Mapping[str, Any]) -> int:
    """The step after which a row of plans has a surgery; -1: it has none."""
    surgery = row.get("surgery")
    step = surgery.get("step") if isinstance(surgery, dict) else None
    return step if isinstance(step, int) else -1


def ended_at(row: Mapping[str, Any]) -> int:
    """The step after which a row of plans has a method that has ended for good; -1: it has none."""
    ended = row.get("ended")
    step = ended.get("step") if isinstance(ended, dict) else None
    return step if isinstance(step, int) else -1


def changed_at(row: Mapping[str, Any]) -> int:
    """The step after which what a row of plans says holds; -1: from the beginning of a process."""
    return max(operated_at(row), ended_at(row))


def _changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The differences of two recipes that make them different runs."""
    return [line for line in differences(old, new) if not line.startswith(_OF_A_START)]


def _lines(rows: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
