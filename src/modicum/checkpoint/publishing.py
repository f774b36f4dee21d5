"""From files that ranks write each for itself to a checkpoint that is there all at once.

No rank waits for another in an exchange, since training uses the same wires. Every rank writes into
a hidden folder and then says so in a small file there. Rank 0 waits for these files, writes the
manifest and renames the folder. The hidden folder has in its name a word that rank 0 drew at the
start, so that a process that is left from an earlier start cannot write into it.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from modicum.checkpoint.manifest import MANIFEST, tensor_file, write_manifest
from modicum.checkpoint.tensor_file import write_file
from modicum.core.errors import InputError
from modicum.core.files import disk_errors, sync

_POLL_SECONDS = 0.02
# A rank whose disk is full makes room by removing its own file; others may do so a little later.
_TRIES = 100


def part_folder(target: Path, nonce: str) -> Path:
    """The hidden folder in which a checkpoint is written."""
    return target.with_name(f".{target.name}.{nonce}.part")


def sweep(folder: Path) -> None:
    """Remove what processes left that died while they saved, and put back what they moved away."""
    for target in put_all_back(folder):
        if target.exists():
            shutil.rmtree(_old(target), ignore_errors=True)
    for left in folder.glob(".step-*.part"):
        shutil.rmtree(left, ignore_errors=True)


def put_all_back(folder: Path) -> list[Path]:
    """Put back each checkpoint of a run that made room for a successor which never came.

    Returns:
        The places of all that made room, also of those whose successor did come.
    """
    places = [
        folder / old.name.removeprefix(".").removesuffix(".old")
        for old in folder.glob(".step-*.old")
    ]
    for place in places:
        put_back(place)
    return places


def put_back(target: Path) -> None:
    """Put a checkpoint back that made room for a successor which never came.

    Where nothing can be written it stays where it is.
    """
    old = _old(target)
    with suppress(OSError):  # also where another rank has just done it
        if old.exists() and not target.exists():
            os.replace(old, target)


def _old(target: Path) -> Path:
    return target.parent / f".{target.name}.old"


def write_part(
    part: Path, rank: int, content: Iterable[memoryview], size: int, *, direct: bool
) -> dict[str, Any]:
    """Write a rank's file: its entry in the manifest.

    Raises:
        InputError: the disk is full or cannot be written; what was written is removed.
    """
    path = part / tensor_file(rank)
    with disk_errors(part.parent):
        try:
            part.mkdir(parents=True, exist_ok=True)
            return {"bytes": size, "crc32": write_file(path, content, direct=direct)}
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def report(part: Path, rank: int, content: Mapping[str, Any]) -> None:
    """Tell rank 0 that this rank has done its part, or what is in the way.

    Raises:
        InputError: the disk is full or cannot be written, and stays so.
    """
    path = _report(part, rank)
    with disk_errors(part.parent):
        for attempt in range(_TRIES):
            try:
                part.mkdir(parents=True, exist_ok=True)
                path.with_suffix(".new").write_text(json.dumps(content), encoding="utf-8")
                os.replace(path.with_suffix(".new"), path)
                return
            except OSError:
                if attempt == _TRIES - 1:
                    raise
                time.sleep(_POLL_SECONDS)


def reports(part: Path, ranks: Iterable[int], given_up: Callable[[], bool]) -> list[dict[str, Any]]:
    """Wait until these ranks have reported: what they say, in order.

    Raises:
        InputError: `given_up` became true before.
    """
    found = []
    for rank in ranks:
        path = _report(part, rank)
        while not path.exists():
            if given_up():
                raise InputError(f"rank {rank} has not written its part", file=part)
            time.sleep(_POLL_SECONDS)
        found.append(json.loads(path.read_text(encoding="utf-8")))
        path.unlink()
    return found


def _report(part: Path, rank: int) -> Path:
    return part / f"rank-{rank:05d}.json"


def publish(part: Path, target: Path, manifest: Mapping[str, Any], tensors: str) -> None:
    """Write the manifest, and make the hidden folder the checkpoint.

    A checkpoint that is there already makes room in the last moment. A process that dies in it
    leaves the old one under a hidden name, where it stays until the next one is in place, or
    `put_back` puts it back.

    Raises:
        InputError: the disk is full or cannot be written.
    """
    with disk_errors(part.parent):
        write_manifest(part / MANIFEST, manifest, tensors)
        sync(part)
        try:
            _replace(part, target)
        except OSError:
            if not target.exists():
                raise
            _replace(part, target)  # a reader has just put the old one back
        sync(target.parent)
        shutil.rmtree(_old(target), ignore_errors=True)


def _replace(part: Path, target: Path) -> None:
    """Put a folder in its place; one that is there makes room."""
    if target.exists():
        shutil.rmtree(_old(target), ignore_errors=True)
        os.replace(target, _old(target))
    os.replace(part, target)
