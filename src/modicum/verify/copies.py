"""A copy of a run's folder in which some of its steps can be done again; the run's stays as it is.

Large files are links: what the trainer writes anew replaces a link, and never what it names.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from modicum.checkpoint import CheckpointStore
from modicum.core.errors import InputError
from modicum.core.files import write_json
from modicum.core.run_folders import no_run
from modicum.trainer.folder import (
    BASE,
    EVALUATIONS,
    METRICS,
    PLAN,
    PREPARED,
    RECIPE,
    RUN,
    SAMPLES,
    START,
    RunFolder,
    changed_at,
)

# What a run makes of its inputs before its first update.
MADE = ("data", "tokenizer", BASE, PREPARED, START)


def begun_run(path: str | Path) -> RunFolder:
    """The folder of a run.

    Raises:
        InputError: there is none, or a process is at work on it.
    """
    folder = RunFolder(Path(path))
    if not folder.path.is_dir() or not folder.started():
        raise no_run(folder.path)
    with suppress(FileNotFoundError), open(folder.path / "lock", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = "is in use, and changes meanwhile; stop it first, its state is saved then"
            raise InputError(problem, file=folder.path) from None
        except OSError:  # the disk keeps no locks, so nobody holds one
            pass
    return folder


def ranks_of(run: RunFolder) -> int:
    """How many ranks made the run, by its newest plan."""
    rows = run.rows(PLAN)
    return int(rows[-1].get("ranks", 1)) if rows else 1


def copied(run: RunFolder, target: Path, step: int, parts: Collection[str] = MADE) -> RunFolder:
    """A folder from which the run resumes after `step`, by the plan that it has.

    Args:
        step: of a checkpoint that is there; 0: the beginning.
        parts: the folders of what was made of the inputs; what is left out is made anew.
    """
    target.mkdir(parents=True)
    copy = RunFolder(target)
    shutil.copyfile(run.path / RECIPE, target / RECIPE)
    known = run.read_record()
    kept = {name: known.get(name) for name in ("modicum", "forked_from")}
    write_json(target / RUN, {"status": "interrupted", **kept, "directory": str(run.directory())})
    rows = run.rows(PLAN)
    copy.append(PLAN, *(row for row in rows if changed_at(row) <= step))
    for name in (METRICS, EVALUATIONS, SAMPLES):
        copy.append(name, *(row for row in run.rows(name) if row["step"] <= step and step))
    for name in parts:
        if (run.path / name).is_dir():
            link_tree(run.path / name, target / name)
    if step:
        store = CheckpointStore(target / "checkpoints")
        link_tree(CheckpointStore(run.path / "checkpoints").path(step), store.path(step))
    return copy


def link_tree(source: Path, target: Path) -> None:
    """A tree of folders whose files are links to those of `source`."""
    shutil.copytree(source, target, copy_function=_linked)


def _linked(source: str, target: str) -> Any:
    """A hard link to a file; a symbolic one where the two are on different disks."""
    try:
        os.link(source, target)
    except OSError:
        os.symlink(os.path.realpath(source), target)
