"""Under which name a tracker knows a run folder; kept there, so that it knows a resumed run."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

from modicum.core.errors import InputError
from modicum.core.files import write_json

IDS = "tracking.json"


def read_ids(folder: Path) -> dict[str, str]:
    """The names, by tracker.

    Raises:
        InputError: the file is damaged.
    """
    file = folder / IDS
    if not file.exists():
        return {}
    try:
        return {str(kind): str(name) for kind, name in json.loads(file.read_bytes()).items()}
    except (ValueError, AttributeError):
        problem = "is damaged: not JSON of names; remove it, and trackers begin a new run"
        raise InputError(problem, file=file) from None


def kept_id(folder: Path, kind: str) -> str:
    """The folder's name with a tracker, drawn the first time.

    Raises:
        InputError: the file of names is damaged.
    """
    ids = read_ids(folder)
    if kind not in ids:
        ids[kind] = secrets.token_hex(8)
        write_json(folder / IDS, ids)
    return ids[kind]
