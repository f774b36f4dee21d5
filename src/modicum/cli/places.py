"""Places to write to: refused before the work whose result goes there, not after it."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from modicum.core.errors import InputError
from modicum.core.files import disk_errors

# What no bug of ours brings about, whichever file it is.
_OF_THE_SYSTEM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE)


def check_folder(path: str | Path, field: str | None = None) -> Path:
    """The path, if a folder is there, or can be made there, that takes files; nothing is left.

    Raises:
        InputError: a file is in the way, a name is too long or no text, or nothing can be written.
    """
    folder = Path(path)
    _check_names(folder, field)
    there = folder
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    try:
        with disk_errors(there):
            with tempfile.TemporaryFile(dir=there):
                pass
            longest = os.pathconf(there, "PC_NAME_MAX")
    except InputError as error:
        raise error.located(field=field) from None
    except NotADirectoryError:
        raise InputError(
            "a folder is needed, and this is a file", file=there, field=field
        ) from None
    except OSError as error:
        refused = refusal(error)
        if refused is None:
            raise
        raise InputError(refused.problem, file=there, field=field) from None
    for name in folder.parts[len(there.parts) :]:
        if len(os.fsencode(name)) > longest:
            raise _too_long(field, name, longest)
    if len(os.fsencode(folder.absolute())) > os.pathconf(there, "PC_PATH_MAX") - longest:
        raise InputError("this path is too long", file=there, field=field)
    return folder


def check_file(path: str | Path, field: str | None = None) -> Path:
    """The path, if a file can be written there, with folders that are missing; nothing is left.

    Raises:
        InputError: a folder is in the way, or as with `check_folder`.
    """
    file = Path(path)
    _check_names(file, field)
    if os.path.isdir(file):
        problem = "a file is needed, and this is a folder; name one in it"
        raise InputError(problem, file=file, field=field)
    check_folder(file.parent, field)
    # It is written under a longer name, hidden and with the number of the process, and renamed.
    longest = 255 - len(f"..{2**22}.part")
    if len(os.fsencode(file.name)) > longest:
        raise _too_long(field, file.name, longest)
    return file


def refusal(error: OSError) -> InputError | None:
    """What the system refused a file, as one message; None for errors that may be a bug."""
    name = error.filename
    if error.strerror is None or not (name or error.errno in _OF_THE_SYSTEM):
        return None
    problem = f"the system says: {error.strerror[0].lower()}{error.strerror[1:]}"
    return InputError(problem, file=os.fsdecode(name) if isinstance(name, str | bytes) else None)


def _check_names(path: Path, field: str | None) -> None:
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:
        raise InputError("not UTF-8 text", field=field, value=str(path)) from None
    if "\0" in str(path):
        raise InputError("no name has a zero byte", field=field, value=str(path))


def _too_long(field: str | None, name: str, longest: int) -> InputError:
    return InputError(
        f"this name has {len(os.fsencode(name))} bytes",
        field=field,
        value=f"{name[:40]}...",
        allowed=f"at most {longest} bytes in a name here",
    )
