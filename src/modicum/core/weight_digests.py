"""Whether a model's files are those that they were: digests of every byte of them.

SHA-256 reads one or two gigabytes a second on one core, in pieces. A large file's digest is
remembered in the user's cache until the file is touched, so that a run's next start does not wait.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from modicum.core.errors import InputError
from modicum.core.files import file_digest, json_object, regular, user_cache, write_json

# Next to an adapter's own files: the digests of the base model that it was trained on.
BASE_WEIGHTS = "base_weights.json"
_KIND = "sha256:"
# A file that was written a moment ago can be written again without its times telling.
_SETTLED = 2.0
_REMEMBERED = 1 << 26  # smaller files are read again in less time than is worth a note


def weight_digests(folder: Path | None) -> dict[str, str]:
    """A digest of each of a model's weight files; nothing where the model is new."""
    return {name: remembered_digest(file) for name, file in _weights(folder).items()}


def read_digests(file: Path) -> dict[str, str]:
    """The digests that a file holds, such as the one next to an adapter.

    Raises:
        InputError: it is damaged.
    """
    try:
        return {name: str(digest) for name, digest in json_object(file).items()}
    except InputError:
        raise InputError("is damaged: not JSON of digests", file=file) from None


def changed_weights(folder: Path | None, before: Mapping[str, str]) -> list[str]:
    """The weight files that are not what they were when their digests were taken.

    Early versions of modicum took a digest of samples of a file alone. Where such a one is all that
    is known, the file is compared by the same samples.
    """
    files = _weights(folder)

    def same(name: str) -> bool:
        if name not in files or name not in before:
            return False
        full = before[name].startswith(_KIND)
        return before[name] == (remembered_digest if full else _sampled)(files[name])

    return [name for name in sorted(files.keys() | before.keys()) if not same(name)]


def _weights(folder: Path | None) -> dict[str, Path]:
    files = [] if folder is None else sorted(folder.glob("*.safetensors"))
    return {file.name: file for file in files}


def remembered_digest(file: Path) -> str:
    """The digest of all of a file's bytes; a large file's as remembered, until it is touched."""
    if file.stat().st_size < _REMEMBERED:
        return _KIND + file_digest(file)
    path = file.resolve()
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:32]
    kept, state = user_cache("digests") / f"{name}.json", _state(path)
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(regular(kept).read_bytes())
        if known["state"] == state:
            return str(known["digest"])
    digest = _KIND + file_digest(path)
    settled = time.time() - max(path.stat().st_mtime, path.stat().st_ctime) > _SETTLED
    if settled and _state(path) == state:
        with suppress(OSError, InputError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_json(kept, {"file": str(path), "state": state, "digest": digest})
    return digest


def _state(path: Path) -> list[int]:
    """What changes when a file is written: its size, its times, and which file it is."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]


def _sampled(file: Path, places: int = 1024) -> str:
    """The digest of early versions: the size, the first 64 KiB and places spread over the file."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(file, "rb") as handle:
        digest.update(handle.read(1 << 16))
        for place in range(places):
            handle.seek(size * place // places)
            digest.update(handle.read(256))
    return digest.hexdigest()[:32]
