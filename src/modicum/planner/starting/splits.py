"""The validation data that lies next to the data to train on, under one of the usual names."""

from __future__ import annotations

import re
from pathlib import Path

from modicum.data.unpacking import content_name

VALIDATION = ("validation", "valid", "val", "dev", "eval")


def split_of(path: str) -> tuple[str, str | None]:
    """What to train on, and the file or folder to evaluate on, if there is one.

    Of a folder that holds `train` and `validation`, those; of `my-train.jsonl`, `my-val.jsonl`.
    """
    root = Path(path).expanduser()
    if root.is_dir():
        train = _named(root, ("train", "training"), "")
        if train is None:
            return path, None
        return str(train), _text(_named(root, VALIDATION, _suffix(train)))
    if not root.is_file():
        return path, None
    stem, suffix = content_name(root).stem, _suffix(root)
    near = [re.sub(r"(?i)train(ing)?", name, stem) for name in VALIDATION]
    near += [f"{stem}{mark}{name}" for name in VALIDATION for mark in "-_."]
    wanted = [*(name for name in near if name != stem), *VALIDATION]
    return path, _text(_named(root.parent, wanted, suffix, other=root))


def _named(
    folder: Path, names: list[str] | tuple[str, ...], suffix: str, other: Path | None = None
) -> Path | None:
    """The first of these names in a folder, of files with this suffix; any where it is empty."""
    there = {_stem(path).lower(): path for path in sorted(folder.iterdir()) if path != other}
    for name in names:
        path = there.get(name.lower())
        if path is not None and (not suffix or _suffix(path) == suffix):
            return path
    return None


def _stem(path: Path) -> str:
    return path.name if path.is_dir() else content_name(path).stem


def _suffix(path: Path) -> str:
    return "" if path.is_dir() else content_name(path).suffix.lower()


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
