"""The catalog: every method that is there, read from syntax trees, without importing its file.

Importing torch takes seconds; a list of methods, or a message about a typo in a recipe, must not.
So `info`, fields, defaults and annotated bounds of a method are read from its source; those of an
optimizer are the keywords of its `__init__`. A test checks that what is read is what importing the
file gives.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from modicum.core.contracts import source_reading
from modicum.core.contracts.method import Against, Info, Method, describe
from modicum.core.contracts.optimizers import value_class
from modicum.core.errors import InputError
from modicum.core.files import regular, user_cache, write_json

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


@dataclass(frozen=True)
class MethodRecord:
    """A method as the catalog knows it.

    Args:
        defaults: of its fields, `...` where a field has none.
        summary: the first line of its docstring.
        module: what it is imported as; None: by its path.
    """

    info: Info
    file: Path
    class_name: str
    defaults: Mapping[str, Any]
    summary: str = ""
    module: str | None = None
    _loaded: list[type[Method]] = field(default_factory=list, repr=False, compare=False)

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def room(self) -> str:
        return self.info.room

    @property
    def title(self) -> str:
        return self.info.title

    @property
    def status(self) -> str:
        return self.info.status

    @functools.cached_property
    def fields(self) -> Mapping[str, tuple[Any, Any]]:
        """The type and default of each field, read from the file."""
        for node in _classes(self.file):
            if node.name == self.class_name:
                return source_reading.fields(self.file, node)
        raise InputError(f"the class {self.class_name} is not there any more", file=self.file)

    @functools.cached_property
    def model(self) -> type[BaseModel]:
        """A pydantic model of the method's fields, the same checks as the method's own."""
        model: type[BaseModel] = create_model(  # type: ignore[call-overload]
            self.class_name,
            __config__=ConfigDict(extra="forbid", strict=True, validate_default=True),
            **dict(self.fields),
        )
        return model

    def validate(self, values: Mapping[str, Any], *, prefix: str = "", **where: Any) -> None:
        """Check hyper-parameters without importing the method.

        Raises:
            InputError: names the field `prefix + field`, its value, and what is allowed.
        """
        try:
            self.model.model_validate(dict(values))
        except ValidationError as error:
            raise describe(error, self.fields, prefix=prefix, **where) from None

    def load(self) -> type[Method]:
        """Import the method's file and return the class of its values.

        That is the method's own; for an optimizer, one derived from its signature.
        """
        if not self._loaded:
            module = importlib.import_module(self.module) if self.module else _import(self.file)
            found = getattr(module, self.class_name)
            self._loaded.append(found if issubclass(found, Method) else value_class(found))
        return self._loaded[0]

    def traits(self, values: Mapping[str, Any]) -> frozenset[str]:
        """The traits of the method with these hyper-parameters, and defaults for the rest."""
        return self.info.traits_of({**self.defaults, **values})

    def as_json(self) -> dict[str, Any]:
        """What `modicum methods --json` prints of the method."""
        return {
            "name": self.name,
            "room": self.room,
            "title": self.title,
            "status": self.status,
            "paper": self.info.paper,
            "claim": self.info.claim,
            "claim_verdict": self.info.claim_verdict,
            "against": asdict(self.info.against),
            "verdict": self.info.verdict,
            "reason": self.info.reason,
            "traits": list(self.info.traits),
            "traits_if": [list(triple) for triple in self.info.traits_if],
            "excludes": [list(pair) for pair in self.info.excludes],
            "fields": dict(self.defaults),
        }


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
    if name.isidentifier():
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
    kept = _kept(stamp)
    if kept is None:
        kept = [record for file in files for record in _of_package(file)]
        _keep(stamp, kept)
    return {record.name: record for record in kept}


def _of_package(file: Path) -> list[MethodRecord]:
    if b"Info(" not in file.read_bytes():
        return []
    return read_file(file, module=f"modicum.{file.parent.name}.{file.stem}")


def _cache_file() -> Path:
    place = f"{source_reading.SOURCES} {sys.version}"
    return user_cache("catalog") / f"{hashlib.sha256(place.encode()).hexdigest()[:16]}.json"


def _keep(stamp: list[Any], records: list[MethodRecord]) -> None:
    """Write what was read, for the next process; where that cannot be, it reads them again."""
    rows = [
        asdict(record.info)
        | {"_file": str(record.file), "_class": record.class_name, "_summary": record.summary}
        | {"_defaults": _written(record.defaults), "_module": record.module}
        for record in records
    ]
    with suppress(InputError, OSError, RuntimeError):
        file = _cache_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"stamp": stamp, "methods": rows})


def _written(defaults: Mapping[str, Any]) -> str:
    """A dictionary's literal, as `ast.literal_eval` reads it."""
    pairs = (f"{k!r}: {'...' if v is ... else repr(v)}" for k, v in defaults.items())
    return f"{{{', '.join(pairs)}}}"


def _kept(stamp: list[Any]) -> list[MethodRecord] | None:
    """The records of the cache; None where there are none of these files."""
    try:
        content = json.loads(regular(_cache_file()).read_bytes())
        if content["stamp"] != stamp:
            return None
        return [_from_row(row) for row in content["methods"]]
    except (OSError, ValueError, KeyError, TypeError, SyntaxError, InputError, RuntimeError):
        return None  # there is none, or it is damaged


def _from_row(row: dict[str, Any]) -> MethodRecord:
    own = {key: row.pop(f"_{key}") for key in ("file", "class", "summary", "defaults", "module")}
    row["traits"] = tuple(row["traits"])
    row["against"] = Against(**row["against"])
    row["traits_if"] = tuple(tuple(triple) for triple in row["traits_if"])
    row["excludes"] = tuple(tuple(pair) for pair in row["excludes"])
    defaults = ast.literal_eval(own["defaults"])
    if not isinstance(defaults, dict):
        raise ValueError("no fields")
    file, module = Path(own["file"]), str(own["module"])
    return MethodRecord(Info(**row), file, own["class"], defaults, own["summary"], module)


def _from_entry_points() -> Iterator[MethodRecord]:
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
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


def read_file(path: str | Path, module: str | None = None) -> list[MethodRecord]:
    """The methods that a Python file defines, read from its syntax tree.

    Raises:
        InputError: no such file, a syntax error (with its line), or an `info` or a field that
            cannot be read without running the file.
    """
    file = Path(path)
    if not file.is_file():
        raise InputError("no such plugin file", file=file)
    return [_record(file, node, module) for node in _classes(file)]


def _classes(file: Path) -> list[ast.ClassDef]:
    """The classes of a file that have an `info`."""
    nodes = source_reading.parse(file).body
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    return [node for node in classes if source_reading.assigned(node, "info") is not None]


def _record(file: Path, node: ast.ClassDef, module: str | None) -> MethodRecord:
    known = source_reading.names(source_reading.parse(file))
    info = source_reading.evaluate(source_reading.assigned(node, "info"), known, file)
    if not isinstance(info, Info):
        raise InputError("`info` must be an Info(...) of literals", file=file, line=node.lineno)
    summary = (ast.get_docstring(node) or "").strip().split("\n")[0]
    fields = source_reading.fields(file, node)
    defaults = {name: default for name, (_, default) in fields.items()}
    record = MethodRecord(info, file, node.name, defaults, summary, module)
    record.__dict__["fields"] = fields  # the cached property's
    return record


def _import(file: Path) -> Any:
    """Import a plugin by its path, once."""
    path = file.resolve()
    # Files of one name in two folders are two modules.
    name = f"modicum_plugin_{file.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError("not a Python file", file=file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
