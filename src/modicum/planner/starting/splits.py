"""The validation data that lies next to the data to train on, under one of the usual names."""

from __future__ import annotations

import re
from pathlib import Path

from modicum.core.errors import InputError
from modicum.data.globs import walk
from modicum.data.source_files import ROW_SUFFIXES
from modicum.data.unpacking import content_name

TRAIN = ("train", "training")
VALIDATION = ("validation", "valid", "val", "dev", "eval")
TEST = ("test", "testing")
# A part of a split, as data sets of the hub are stored; one that is in a single file is that file.
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
_ONLY_SHARD = re.compile(r"-00000-of-00001$")


def split_of(path: str) -> tuple[str, str | None]:
    """What to train on, and the file or folder to evaluate on, if there is one.

    Of a folder that holds `train` and `validation`, those, also below `data`, where the hub has
    them; of `my-train.jsonl`, `my-val.jsonl`.

    Raises:
        InputError: a folder's rows are of several splits, in more files than one can be chosen of.
    """
    root = Path(path).expanduser()
    if root.is_dir():
        for folder in (root, root / "data"):
            train = _named(folder, TRAIN, "") if folder.is_dir() else None
            if train is not None:
                return str(train), _text(_named(folder, VALIDATION, _suffix(train)))
        _check_one(root)
        return path, None
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


def _check_one(root: Path) -> None:
    """Refuse a folder whose rows are of several splits."""
    of_rows = [_stem(path).lower() for _, path in walk(root) if _suffix(path) in ROW_SUFFIXES]
    stems = {_SHARD.sub("", stem) for stem in of_rows}
    found = [name for name in (*TRAIN, *VALIDATION, *TEST) if name in stems]
    if len(found) > 1 and not stems.isdisjoint((*VALIDATION, *TEST)):
        first = next((name for name in found if name in TRAIN), found[0])
        raise InputError(
            f"this folder's files are of several splits ({', '.join(found)}), and all of "
            f"them would be trained on; say which are: --set 'data.include=[\"**/{first}*\"]'",
            field="data.path",
            value=str(root),
        )


def _stem(path: Path) -> str:
    return path.name if path.is_dir() else _ONLY_SHARD.sub("", content_name(path).stem)


def _suffix(path: Path) -> str:
    return "" if path.is_dir() else content_name(path).suffix.lower()


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
