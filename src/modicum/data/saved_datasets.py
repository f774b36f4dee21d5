"""Folders that `datasets.save_to_disk` wrote: which Arrow files are theirs, without `datasets`."""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import Any

from modicum.core.errors import InputError
from modicum.core.files import read_json

_STATE, _SPLITS = "state.json", "dataset_dict.json"


def saved_files(root: Path) -> list[tuple[str, Path]] | None:
    """Name and path of the Arrow files of a saved data set, in its order; None of other folders.

    Raises:
        InputError: the folder holds several splits, a file is missing, or its rows are chosen by
            indices, as versions of `datasets` before 2.0 saved some.
    """
    if (root / _SPLITS).is_file():
        splits = _names(root / _SPLITS, "splits")
        raise InputError(
            "the folder is a saved data set of several splits; name one",
            file=root,
            allowed=", ".join(str(root / split) for split in splits),
        )
    if not (root / _STATE).is_file() or not (root / "dataset_info.json").is_file():
        return None
    if _content(root / _STATE).get("_indices_data_files"):
        raise InputError(
            "the saved data set keeps its rows apart from their order; save it again after "
            "`flatten_indices()`",
            file=root / _STATE,
        )
    files = [(name, root / name) for name in _names(root / _STATE, "_data_files")]
    for name, path in files:
        if not path.is_file():
            raise InputError(f"the saved data set names {name!r}, and it is missing", file=path)
    return files


def _names(path: Path, key: str) -> list[str]:
    """The names that a list in a file has, each of something in the same folder.

    Raises:
        InputError: there is no such list.
    """
    found = _content(path).get(key)
    if isinstance(found, list):
        named = [each.get("filename") if isinstance(each, dict) else each for each in found]
        names = [name for name in named if isinstance(name, str) and name == PurePath(name).name]
        if len(names) == len(named):
            return names
    raise InputError("holds no list of names", file=path, field=key, value=found)


def _content(path: Path) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict):
        raise InputError("holds no object", file=path)
    return content
