"""Which folders hold a run, and what is said of one from outside. Nothing here imports torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from modicum.core.errors import InputError
from modicum.core.files import read_json, write_json

PEER_LOST = "PeerLost"  # what `run.json` calls the end of another rank
RECORD = "run.json"  # written first, and removed last
# Deep enough for `work/project/runs/mine`; a home folder is not searched for longer than a blink.
_DEPTH, _MOST_FOLDERS = 3, 2000
_RUNS = Path("runs")
_MODEL, _ADAPTERS = "config.json", ("adapter_config.json", "modicum_adapter.json")


def note_interrupted(record: Path, sentence: str) -> None:
    """Say in a run's `run.json` why it was ended, unless a process of the run has said something.

    Raises:
        InputError: it cannot be read or written.
    """
    run = read_json(record)
    if not isinstance(run, dict) or run.get("status") != "running":
        return
    interruptions = run.get("interruptions")
    write_json(
        record,
        run
        | {
            "status": "interrupted",
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
            "interruptions": interruptions + 1 if isinstance(interruptions, int) else 1,
            "error": sentence,
            "failed_by": PEER_LOST,
        },
    )


def no_run(folder: Path, *, models: bool = False) -> InputError:
    """The refusal of a folder that holds no run, with the nearest that does.

    Args:
        models: whether a model's folder would have done, too.
    """
    kinds = "the folder of a run or of a model" if models else "the folder of a run"
    if not folder.exists():
        problem = "no such folder"
    elif not folder.is_dir():
        problem = "this is a file"
    elif is_adapter(folder):
        problem = "this is an adapter alone"
    elif (folder / _MODEL).is_file():
        problem = "this folder holds no run, but a model"
    elif models:
        problem = f"this folder holds neither a run nor a model (no {RECORD}, no {_MODEL})"
    else:
        problem = f"this folder holds no run (no {RECORD})"
    near = nearest_run(folder)
    if near is not None and near.absolute() in folder.absolute().parents:
        return InputError(f"{problem}; give the run's folder, {near}", file=folder)
    such = "" if near is None else f", such as {near}"
    return InputError(f"{problem}; give {kinds}{such}", file=folder)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter's files, and nothing around them."""
    return any((folder / name).is_file() for name in _ADAPTERS)


def nearest_run(folder: Path) -> Path | None:
    """The run that a path lies in, or of a recipe; else the newest in it, else of those here."""
    try:
        for above in list(folder.absolute().parents)[:2]:
            if _is_run(above):
                return _shown(above)
        of_recipe = _RUNS / folder.stem  # where `modicum train` puts a recipe's run
        if folder.suffix in (".yaml", ".yml") and _is_run(of_recipe):
            return of_recipe
        place = folder
        while not place.is_dir():
            place = place.parent
        for searched in (place, Path()):
            if (found := max(_runs_below(searched), key=_changed, default=None)) is not None:
                return _shown(found)
    except OSError:  # a run went away meanwhile, or there is no working folder
        return None
    return None


def _is_run(folder: Path) -> bool:
    return (folder / RECORD).is_file()


def _changed(folder: Path) -> float:
    return (folder / RECORD).stat().st_mtime


def _runs_below(place: Path) -> Iterator[Path]:
    """The runs in a folder, not those within runs; what cannot be read is passed over."""
    seen = 0
    level = [place]
    for _ in range(_DEPTH):
        deeper: list[Path] = []
        for folder in level:
            for entry in _folders(folder):
                seen += 1
                if seen > _MOST_FOLDERS:
                    return
                if _is_run(entry):
                    yield entry
                else:
                    deeper.append(entry)
        level = deeper


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return sorted(
                Path(entry.path)
                for entry in entries
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
            )
    except OSError:
        return []


def _shown(folder: Path) -> Path:
    """A path as people would type it here."""
    try:
        return folder.absolute().relative_to(Path.cwd())
    except ValueError:
        return folder
