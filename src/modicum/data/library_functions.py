"""Labelled texts for everybody: functions of Python's standard library, and their package.

Training and validation have no file in common, so what is learned of one file does not help with
its other functions.
"""

from __future__ import annotations

import ast
import hashlib
import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from modicum.core.errors import InputError
from modicum.core.files import publish_folder
from modicum.data.source_files import library_files

# Those with many functions, in several files.
PACKAGES = (
    "asyncio",
    "email",
    "http",
    "importlib",
    "logging",
    "multiprocessing",
    "unittest",
    "xml",
)
SIDES = ("train", "validation")
_HELD = 0.2  # of a package's functions, at least
_MOST = {"train": 160, "validation": 40}  # of a package, so that none outweighs the others
_CHARACTERS = range(80, 1500)


@dataclass(frozen=True)
class LibraryFunction:
    """A function or method: its source, the package that it is from, and the file."""

    text: str
    label: str
    file: str


def write_functions(folder: str | Path, packages: Sequence[str] = PACKAGES) -> dict[str, int]:
    """Write `train.jsonl` and `validation.jsonl` into a new folder; returns their rows.

    Args:
        folder: each row has a `text`, a `label` and the `file`.

    Raises:
        InputError: something is in the folder already, or this Python has no sources of a package.
    """
    target = Path(folder)
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise InputError("there is something already; give a new folder", file=target)
    sides = library_functions(packages)
    with publish_folder(target) as temporary:
        for side, rows in sides.items():
            lines = (json.dumps(asdict(row)) + "\n" for row in rows)
            (temporary / f"{side}.jsonl").write_text("".join(lines), encoding="utf-8")
    return {side: len(rows) for side, rows in sides.items()}


def library_functions(
    packages: Sequence[str] = PACKAGES,
) -> dict[str, list[LibraryFunction]]:
    """The functions of both sides, in an order that mixes packages and is always the same.

    Raises:
        InputError: this Python has no sources of a package.

    >>> rows = library_functions(["asyncio", "logging"])
    >>> {row.file for row in rows["train"]} & {row.file for row in rows["validation"]}
    set()
    """
    found: dict[str, list[LibraryFunction]] = {side: [] for side in SIDES}
    seen: set[str] = set()
    for package in packages:
        files = {
            file.name: list(_functions(file.path, file.name, package))
            for file in library_files([f"{package}/**"], [], InputError)
        }
        for side, names in _split(files).items():
            rows = sorted((row for name in names for row in files[name]), key=_order)
            # The same text on both sides would be known by heart.
            unique = {row.text: row for row in rows if row.text not in seen}
            seen |= unique.keys()
            found[side] += list(unique.values())[: _MOST[side]]
    return {side: sorted(rows, key=_order) for side, rows in found.items()}


def _split(files: dict[str, list[LibraryFunction]]) -> dict[str, list[str]]:
    """The files of each side: the first by their digest are held out, the last one never."""
    wanted = _HELD * sum(map(len, files.values()))
    order = sorted((name for name in files if files[name]), key=_digest)
    held, count = 0, 0
    while count < wanted and held < len(order) - 1:
        count += len(files[order[held]])
        held += 1
    return {"train": order[held:], "validation": order[:held]}


def _functions(path: Path, name: str, package: str) -> Iterator[LibraryFunction]:
    """The functions of a file that are neither long nor short, without those inside of others."""
    source = path.read_text(encoding="utf-8")
    lines = source.split("\n")
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += ast.iter_child_nodes(node)
            continue
        text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])).strip()
        if len(text) in _CHARACTERS:
            yield LibraryFunction(text, package, name)


def _order(row: LibraryFunction) -> bytes:
    return _digest(row.text)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).digest()
