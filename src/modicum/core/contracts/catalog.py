"""The catalog: every method that is there, read from syntax trees, without importing its file.

Importing torch takes seconds; a list of methods, or a message about a typo in a recipe, must not.
So `info`, fields, defaults and annotated bounds of a method are read from its source; those of an
optimizer are the keywords of its `__init__`. A test checks that what is read is what importing the
file gives.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from modicum.core.contracts import source_reading
from modicum.core.contracts.catalog_cache import keep, kept
from modicum.core.contracts.method import Method
from modicum.core.contracts.method_record import MethodRecord as MethodRecord
from modicum.core.contracts.method_record import read_file as read_file
from modicum.core.errors import InputError

ROOMS = (
    "linears",
    "adapters",
    "compress",
    "optim",
    "memory",
    "comm",
    "parallel",
    "checkpoint",
    "data",
    "solvers",
    "graphs",
    "simulate",
    "models",
    "tasks",
    "serve",
    "federated",
)
ENTRY_POINTS = "modicum.methods"
LONGEST_NAME = 64  # no method's; a file system refuses to look for a file of a name much longer


def catalog(plugins: Iterable[str | Path] = ()) -> dict[str, MethodRecord]:
    """Every method by name: the built-in ones, those of entry points, those of plugin files.

    Raises:
        InputError: a plugin cannot be read, or two methods have one name.
    """
    return {**_built_in(), **added(plugins)}


def added(plugins: Iterable[str | Path] = ()) -> dict[str, MethodRecord]:
    """The methods that are not built in, by name: those of entry points and of plugin files.

    Raises:
        InputError: a plugin cannot be read, or two methods have one name.
    """
    found: dict[str, MethodRecord] = {}
    others = [*_from_entry_points(), *(record for path in plugins for record in read_file(path))]
    for record in others:
        other = found.get(record.name) or built_in(record.name)
        if other is not None:
            raise InputError(
                f"the method {record.name!r} is already defined in {other.file}; give one of them "
                "another name",
                file=record.file,
            )
        found[record.name] = record
    return found


def built_in(name: str) -> MethodRecord | None:
    """The record of a built-in method, whose name is that of its file; no other file is read."""
    if name.isidentifier() and len(name) <= LONGEST_NAME:
        for room in ROOMS:
            file = source_reading.SOURCES / room / f"{name}.py"
            if file.exists():
                for record in _of_package(file):
                    if record.name == name:
                        return record
    return None


def find(name: str, plugins: Iterable[str | Path] = (), room: str | None = None) -> MethodRecord:
    """The record of a method by its name.

    Raises:
        InputError: no such method (in that room), with the nearest name.
    """
    record = built_in(name) or added(plugins).get(name)
    if record is not None and (room is None or record.room == room):
        return record
    every = catalog(plugins)
    known = [key for key, other in every.items() if room is None or other.room == room]
    kind = f"method in the room {room!r}" if room else "method"
    allowed = ", ".join(sorted(known))
    raise InputError(f"unknown {kind}", value=name, allowed=allowed, candidates=known)


def of_package(package: str) -> list[MethodRecord]:
    """The built-in methods whose files are in a package."""
    return [r for r in _built_in().values() if r.module and r.module.startswith(f"{package}.")]


def of_value(method: Method) -> MethodRecord:
    """The record of a method's value, wherever its class came from.

    Raises:
        InputError: the class stands in no file, or names no method of its own there.
    """
    kind = type(method)
    record = built_in(kind.__module__.rpartition(".")[2])
    if record is not None and (record.module, record.class_name) == (
        kind.__module__,
        kind.__name__,
    ):
        return record
    file = getattr(sys.modules[kind.__module__], "__file__", None)
    records = [] if file is None else read_file(file)
    for record in records:
        if record.class_name == kind.__name__:
            return record
    raise InputError(
        "a method in a recipe is a class with an `info` of its own, in a file that the recipe's "
        "plugins name",
        value=kind.__qualname__,
    )


@functools.cache
def _built_in() -> dict[str, MethodRecord]:
    """Every built-in method by name, as the user's cache has it if no file has changed since."""
    files = [
        file for room in ROOMS for file in sorted((source_reading.SOURCES / room).glob("*.py"))
    ]
    contracts = sorted(Path(__file__).parent.glob("*.py"))
    stamp = [[str(f), f.stat().st_mtime_ns, f.stat().st_size] for f in (*contracts, *files)]
    records = kept(stamp)
    if records is None:
        records = [record for file in files for record in _of_package(file)]
        keep(stamp, records)
    return {record.name: record for record in records}


def _of_package(file: Path) -> list[MethodRecord]:
    about = file.stat()
    return _read_once(file, about.st_mtime_ns, about.st_size)


# A recipe asks for its methods many times, and a plan makes many recipes.
@functools.lru_cache(maxsize=1024)
def _read_once(file: Path, changed: int, size: int) -> list[MethodRecord]:
    """The methods of a file of the package, as long as it is what it was."""
    if b"Info(" not in file.read_bytes():
        return []
    return read_file(file, module=f"modicum.{file.parent.name}.{file.stem}")


def _entry_points() -> tuple[importlib.metadata.EntryPoint, ...]:
    """The entry points of the group, looked for again where what holds them has changed."""
    points, texts = _look_for_points(tuple(_changed(place) for place in sys.path))
    if [_text_of(point) for point in points] != texts:
        _look_for_points.cache_clear()
        return _entry_points()
    return points


@functools.lru_cache(maxsize=8)
def _look_for_points(
    places: tuple[tuple[str, int], ...],
) -> tuple[tuple[importlib.metadata.EntryPoint, ...], list[str | None]]:
    """The points, and the text that each was read from: every installed distribution is read."""
    points = tuple(importlib.metadata.entry_points(group=ENTRY_POINTS))
    return points, [_text_of(point) for point in points]


def _text_of(point: importlib.metadata.EntryPoint) -> str | None:
    return None if point.dist is None else point.dist.read_text("entry_points.txt")


def _changed(place: str) -> tuple[str, int]:
    """A place of distributions, and when one last came or went there; 0: it is not there."""
    try:
        return os.path.abspath(place), os.stat(place or os.curdir).st_mtime_ns
    except OSError:
        return place, 0


def _from_entry_points() -> Iterator[MethodRecord]:
    for point in _entry_points():
        # Found on the disk by its distribution, the module is not imported; an editable install
        # knows its files only through the import system.
        inside = point.module.replace(".", "/") + ".py"
        located = None if point.dist is None else str(point.dist.locate_file(inside))
        if located is None or not Path(located).exists():
            located = _find_module(point.module)
        if located is None:
            raise InputError(
                f"the entry point {point.name!r} ({ENTRY_POINTS}) names a module that is not there",
                value=point.value,
            )
        yield from read_file(located, module=point.module)


def _find_module(name: str) -> str | None:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # its package is not there
        return None
    return spec.origin if spec else None
