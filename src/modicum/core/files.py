"""Files that are whole or absent: written beside their place, synced, then renamed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from modicum.core.errors import InputError


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full or read-only disk into one clear message about `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(path if path.exists() else path.parent).free
            raise InputError(
                f"the disk is full ({free} bytes free); free some space and run this again",
                file=path,
            ) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise InputError(
                "cannot write here; check the folder's permissions", file=path
            ) from error
        raise


def sync(path: Path) -> None:
    """Push a file's or a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write `text` so that a reader sees the old file or the new one, never half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    with disk_errors(path):
        try:
            with open(temporary, "w", encoding="utf-8") as handle:
                handle.write(text)
                handle.flush()
                os.fsync(handle.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def publish_folder(target: Path) -> Iterator[Path]:
    """Fill a hidden folder beside `target`; when the block ends well it becomes `target`.

    A block that raises, or a process that dies, leaves `target` as it was.
    """
    temporary = target.with_name(f".{target.name}.part")
    with disk_errors(target):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            yield temporary
            for entry in temporary.rglob("*"):
                sync(entry)
            sync(temporary)
            if target.exists():
                old = target.with_name(f".{target.name}.old")
                shutil.rmtree(old, ignore_errors=True)
                os.replace(target, old)
                os.replace(temporary, target)
                shutil.rmtree(old, ignore_errors=True)
            else:
                os.replace(temporary, target)
            sync(target.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def file_digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal, read in pieces."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
