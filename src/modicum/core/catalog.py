"""The catalog: every method that is there, read from syntax trees, without importing its file.

Importing torch takes seconds; a list of methods, or a message about a typo in a recipe, must not.
So `info`, fields, defaults and annotated bounds of a method are read from its source. Names in
them are looked up in the few modules of `READABLE`, which import nothing heavy. A test checks that
what is read is what importing the file gives.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from modicum.core.errors import InputError, ModicumError
from modicum.core.method import Info, Method, describe

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
    "serve",
    "federated",
)
ENTRY_POINTS = "modicum.methods"
READABLE = {"typing", "pydantic", "annotated_types", "modicum.core.method"}
_SOURCES = Path(__file__).resolve().parents[1]
_PLAIN: dict[str, Any] = {"__builtins__": {}} | {
    kind.__name__: kind for kind in (int, float, str, bool, tuple, list, dict)
}


@dataclass(frozen=True)
class Record:
    """A method as the catalog knows it: `fields` maps a name to its type and default."""

    info: Info
    file: Path
    class_name: str
    fields: Mapping[str, tuple[Any, Any]]
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
        """Import the method's file and return its class."""
        if not self._loaded:
            module = importlib.import_module(self.module) if self.module else _import(self.file)
            self._loaded.append(getattr(module, self.class_name))
        return self._loaded[0]

    def as_json(self) -> dict[str, Any]:
        """What `modicum methods --json` prints of the method."""
        return {
            "name": self.name,
            "room": self.room,
            "title": self.title,
            "status": self.status,
            "paper": self.info.paper,
            "claim": self.info.claim,
            "traits": list(self.info.traits),
            "fields": {name: default for name, (_, default) in self.fields.items()},
        }


def catalog(plugins: Iterable[str | Path] = ()) -> dict[str, Record]:
    """Every method by name: the built-in ones, those of entry points, those of plugin files.

    Raises:
        InputError: a plugin cannot be read, or two methods have one name.
    """
    found = dict(_built_in())
    others = [*_from_entry_points(), *(record for path in plugins for record in read_file(path))]
    for record in others:
        if record.name in found:
            raise InputError(
                f"the method {record.name!r} is already defined in {found[record.name].file}; "
                "give one of them another name",
                file=record.file,
            )
        found[record.name] = record
    return found


def find(name: str, plugins: Iterable[str | Path] = (), room: str | None = None) -> Record:
    """The record of a method by its name.

    Raises:
        InputError: no such method (in that room), with the nearest name.
    """
    known = {
        key: record
        for key, record in catalog(plugins).items()
        if room is None or record.room == room
    }
    if name not in known:
        kind = f"method in the room {room!r}" if room else "method"
        allowed = ", ".join(sorted(known))
        raise InputError(f"unknown {kind}", value=name, allowed=allowed, candidates=known)
    return known[name]


def of_value(method: Method) -> Record:
    """The record of a method's value, wherever its class came from.

    Raises:
        InputError: the class stands in no file, or names no method of its own there.
    """
    kind = type(method)
    for record in _built_in().values():
        if (record.module, record.class_name) == (kind.__module__, kind.__name__):
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
def _built_in() -> dict[str, Record]:
    records: dict[str, Record] = {}
    for room in ROOMS:
        for file in sorted((_SOURCES / room).glob("*.py")):
            if b"Info(" in file.read_bytes():
                for record in read_file(file, module=f"modicum.{room}.{file.stem}"):
                    records[record.name] = record
    return records


def _from_entry_points() -> Iterator[Record]:
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


def read_file(path: str | Path, module: str | None = None) -> list[Record]:
    """The methods that a Python file defines, read from its syntax tree.

    Raises:
        InputError: no such file, a syntax error (with its line), or an `info` or a field that
            cannot be read without running the file.
    """
    file = Path(path)
    if not file.is_file():
        raise InputError("no such plugin file", file=file)
    return [
        _record(file, node, module)
        for node in _parse(file).body
        if isinstance(node, ast.ClassDef) and _assigned(node, "info") is not None
    ]


def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except SyntaxError as error:
        problem = f"not valid Python: {error.msg}"
        raise InputError(problem, file=file, line=error.lineno) from None


def _record(file: Path, node: ast.ClassDef, module: str | None) -> Record:
    names = _names(_parse(file))
    info = _evaluate(_assigned(node, "info"), names, file)
    if not isinstance(info, Info):
        raise InputError("`info` must be an Info(...) of literals", file=file, line=node.lineno)
    summary = (ast.get_docstring(node) or "").strip().split("\n")[0]
    return Record(info, file, node.name, _fields(file, node), summary, module)


def _fields(file: Path, node: ast.ClassDef) -> dict[str, tuple[Any, Any]]:
    """The annotated fields of a class and, first, of its bases within modicum or the file."""
    tree = _parse(file)
    names = _names(tree)
    fields: dict[str, tuple[Any, Any]] = {}
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id != "Method":
            found = _find_class(base.id, file, tree)
            if found is not None:
                fields |= _fields(*found)
    for item in node.body:
        if not (isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)):
            continue
        if ast.unparse(item.annotation).startswith("ClassVar"):
            continue
        kind = _evaluate(item.annotation, names, file)
        default = ... if item.value is None else _evaluate(item.value, names, file)
        fields[item.target.id] = (kind, default)
    return fields


def _find_class(name: str, file: Path, tree: ast.Module) -> tuple[Path, ast.ClassDef] | None:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return file, node
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("modicum."):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    parts = (node.module or "").split(".")[1:]
                    target = _SOURCES.joinpath(*parts).with_suffix(".py")
                    if not target.exists():
                        target = _SOURCES.joinpath(*parts, "base.py")
                    return _find_class(alias.name, target, _parse(target))
    return None


def _names(tree: ast.Module) -> dict[str, Any]:
    """What annotations and literals may refer to: imports from the readable modules."""
    names = dict(_PLAIN)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module in READABLE:
            source = importlib.import_module(node.module)
            names |= {a.asname or a.name: getattr(source, a.name) for a in node.names}
    return names


def _assigned(node: ast.ClassDef, name: str) -> ast.expr | None:
    for item in node.body:
        if not isinstance(item, ast.Assign | ast.AnnAssign):
            continue
        targets = item.targets if isinstance(item, ast.Assign) else [item.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return item.value
    return None


def _evaluate(node: ast.expr | None, names: dict[str, Any], file: Path) -> Any:
    if node is None:
        return None
    try:
        return eval(compile(ast.Expression(node), str(file), "eval"), names)
    except ModicumError as error:
        raise InputError(str(error), file=file, line=node.lineno) from None
    except Exception as error:
        readable = ", ".join(sorted(READABLE))
        raise InputError(
            f"cannot be read without running the file ({error}); use literals, and types from "
            f"{readable}",
            file=file,
            line=node.lineno,
        ) from None


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
