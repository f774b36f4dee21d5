"""One process at a time in a folder: who comes second is refused, with who holds it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from modicum.core.errors import InputError
from modicum.core.files import disk_errors

LOCK = "lock"


@contextmanager
def locked_folder(path: Path, what: str) -> Iterator[None]:
    """Hold a folder for this process, making it where it is missing.

    The lock ends with the process, however that ends.

    Args:
        what: the folder is of, in the error's sentence: a run, a comparison.

    Raises:
        InputError: another process holds it, it cannot be made or written, or its disk keeps no
            locks.
    """
    with ExitStack() as stack:
        with disk_errors(path):
            try:
                path.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError):
                problem = f"a {what} needs a folder, and this is a file"
                raise InputError(problem, file=path) from None
            handle = stack.enter_context(open(path / LOCK, "a+", encoding="utf-8"))
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            holder = handle.read().strip() or "another process"
            raise InputError(
                f"this {what} is in use by {holder}; wait for it, stop it, or give another --out",
                file=path,
            ) from None
        except OSError as error:
            raise InputError(
                f"this disk keeps no locks ({error.strerror}), so two processes could write here "
                "at once; give an --out on another disk",
                file=path,
            ) from error
        with disk_errors(path):  # not through the file's buffer, whose end would fail once more
            os.ftruncate(handle.fileno(), 0)
            os.write(handle.fileno(), f"process {os.getpid()}".encode())
        yield
