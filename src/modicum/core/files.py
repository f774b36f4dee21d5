"""Files that are complete or absent: written next to their place, synced, then renamed."""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from modicum.core.errors import InputError

JsonObject = dict[str, Any]
DISK_IS_FULL = "the disk is full"  # as the message begins
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
_A_FILE = "a folder is needed, and this is a file; give a new one"
_RUN_IN = "this process runs in the folder, which would be replaced; give a new one"
# What macOS writes into a folder that it shows.
_SHOWN = {".DS_Store"}


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full or read-only disk into one clear message about `path`.

    Raises:
        InputError: the disk is full, or nothing can be written there.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = _number(error)
        if number in _FULL:
            raise InputError(
                f"{DISK_IS_FULL} ({_free(path)}); free some space and run this again", file=path
            ) from error
        if number in _FORBIDDEN:
            raise InputError(
                "cannot write here; check the folder's permissions", file=path
            ) from error
        raise


def _number(error: Exception) -> int | None:
    """The system's error number; safetensors tells it in its message alone."""
    if isinstance(error, OSError):
        return error.errno
    match = re.search(r"(?:\(os error |\bOs { code: )(\d+)", str(error))
    return int(match[1]) if match else None


def _free(path: Path) -> str:
    while not path.exists() and path != path.parent:
        path = path.parent
    return f"{shutil.disk_usage(path).free} bytes free"


def read_bytes(path: Path, at_most: int = -1) -> bytes:
    """All of a regular file; a pipe, of which one would wait for more, is refused.

    Args:
        at_most: read no more bytes than this; -1: all.

    Raises:
        InputError: there is none, or it cannot be read.
    """
    try:
        with open(regular(path), "rb") as handle:
            return handle.read(at_most)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=path) from None


def regular(path: Path) -> Path:
    """The path itself, if it is that of a regular file: what reads a pipe or a device never ends.

    Raises:
        OSError: it is none, or there is none.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "this is no regular file", str(path))
    return path


def read_text(path: Path) -> str:
    """The text of a regular file in UTF-8.

    Raises:
        InputError: there is none, it cannot be read, or is no text.
    """
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"this is not UTF-8 text (byte {error.start})", file=path) from None


def read_json(path: Path) -> Any:
    """The value of a JSON file.

    Raises:
        InputError: there is none, it cannot be read, or is no JSON; with the line where one is at
            fault.
    """
    text = read_text(path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"this is not JSON: {error.msg}", file=path, line=error.lineno) from None
    except (ValueError, RecursionError):  # a number of thousands of digits, brackets in brackets
        raise InputError("this JSON holds what is too large to be meant", file=path) from None


def json_object(path: Path) -> JsonObject:
    """The object that a JSON file holds.

    Raises:
        InputError: as `read_json`; or it holds something else.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise InputError("this holds no JSON object", file=path)
    return value


def sync(path: Path) -> None:
    """Push a file's or a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write `text` so that a reader sees the old file or the new one, never half of it.

    Half a surrogate pair, which damaged JSON may hold and UTF-8 may not, is written as its escape.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    with disk_errors(path):
        try:
            with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as handle:
                handle.write(text)
                handle.flush()
                os.fsync(handle.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def user_cache(name: str) -> Path:
    """The folder of this name in the user's cache: in `$XDG_CACHE_HOME/modicum`, or `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "modicum" / name


def located(name: str | None) -> str | None:
    """The name of a folder that is here as an absolute path; another, such as a hub's, as it is."""
    return name if name is None or not Path(name).exists() else str(Path(name).resolve())


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, where there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def publish_file(target: Path) -> Iterator[Path]:
    """Write a hidden file next to `target`; when the block ends well it becomes `target`.

    Folders that are missing are made.

    Raises:
        InputError: the disk is full or cannot be written.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            sync(temporary)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def publish_folder(target: Path) -> Iterator[Path]:
    """Fill a hidden folder next to `target`; when the block ends well it becomes `target`.

    Of a link, it becomes the folder that the link names. Processes that publish the same folder at
    once, as ranks that all save, do so in turns, and the last one's stays. A block that raises, or
    a process that dies in it, leaves `target` as it was. A process that dies in the instant in
    which an old folder makes room leaves it under its hidden name, and the next publication puts it
    back before it begins.

    Raises:
        InputError: the disk is full or cannot be written; a file is there, or the folder that this
            process runs in.
    """
    with disk_errors(target):
        place = _place(target)
        temporary, old = place.with_name(f".{place.name}.part"), _old(place)
        if old.exists() and not place.exists():
            os.replace(old, place)
        handle, published = _taken(temporary), False
        try:
            yield temporary
            mode = stat.S_IMODE(temporary.stat().st_mode) & 0o666
            for entry in temporary.rglob("*"):
                if entry.is_file() and not entry.is_symlink():
                    # Some libraries write for the owner alone, whatever the umask says.
                    entry.chmod(stat.S_IMODE(entry.stat().st_mode) | mode)
                sync(entry)
            sync(temporary)
            _remove_old(place)
            if place.exists():
                os.replace(place, old)
            os.replace(temporary, place)
            published = True  # and another process may have a folder of the hidden name now
            sync(place.parent)
            _remove_old(place)
        finally:
            if not published:
                shutil.rmtree(temporary, ignore_errors=True)
            with suppress(OSError):  # also for who was forked meanwhile
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)


def _taken(temporary: Path) -> int:
    """Make an empty folder that is this process's until what is returned is closed."""
    while True:
        temporary.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # whoever had it has published it
            handle = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
            try:
                with suppress(OSError):  # a disk that keeps no locks
                    fcntl.flock(handle, fcntl.LOCK_EX)
                if os.path.samestat(os.stat(temporary), os.fstat(handle)):
                    for left in temporary.iterdir():  # by a process that died
                        remove(left)
                    return handle
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)


def check_replaced(folder: Path, what: str, others: Callable[[set[str]], Collection[str]]) -> None:
    """Make sure that nothing is lost but what is our own where a folder is replaced.

    Every rank calls this, so that none waits for one that has refused.

    Args:
        what: a word for what is written, in the error: adapter, model.
        others: of the names in the folder, those that are not of such a one. It is not asked of
            what macOS writes there.

    Raises:
        InputError: it is a file, holds something else, or is the one that this process runs in.
    """
    with disk_errors(folder):
        try:
            lost = others(set(os.listdir(folder)) - _SHOWN)
            here = _is_run_in(Path(os.path.realpath(folder)))
        except FileNotFoundError:  # or just moved away by the rank that writes
            return
        except NotADirectoryError:
            raise InputError(_A_FILE, file=folder) from None
    if lost:
        problem = f"this folder holds other files too, which the {what}'s would replace"
        raise InputError(f"{problem}; give a new one", file=folder, value=min(lost))
    if here:
        raise InputError(_RUN_IN, file=folder)


def _place(target: Path) -> Path:
    """Where a folder is published: `.` by its name, and of a link the folder that it names.

    Raises:
        InputError: a file is there, or the folder that this process runs in.
    """
    place = Path(os.path.realpath(target))
    if os.path.lexists(place) and not place.is_dir():
        raise InputError(_A_FILE, file=target)
    if _is_run_in(place):
        raise InputError(_RUN_IN, file=target)
    return place


def _is_run_in(place: Path) -> bool:
    """Whether this process runs in a folder, or in one inside of it."""
    try:
        here = Path(os.getcwd())
    except OSError:  # it was removed
        return False
    return place in (here, *here.parents)


def _old(place: Path) -> Path:
    """Where the folder at a place is while the next one comes there."""
    return place.with_name(f".{place.name}.old")


def _remove_old(place: Path) -> None:
    """Remove what made room for a folder, under a name from which nothing is put back.

    So half of it, where a process dies meanwhile, is never taken for a folder that was published.
    """
    gone = f".{place.name}.{os.getpid()}.{secrets.token_hex(4)}.gone"
    with suppress(FileNotFoundError):
        _old(place).rename(place.with_name(gone))
    for left in place.parent.glob(f".{glob.escape(place.name)}.*.gone"):
        remove(left)


def file_digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal, read in pieces.

    Raises:
        OSError: it is no regular file, or cannot be read.
    """
    with open(regular(path), "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
