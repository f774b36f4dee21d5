"""A method as the catalog knows it, read from the syntax tree of its file."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from modicum.core.contracts import source_reading
from modicum.core.contracts.method import Info, Method, describe
from modicum.core.contracts.optimizers import value_class
from modicum.core.contracts.search import SearchTable
from modicum.core.contracts.search_check import RECIPE_FIELDS, check_search, field_bounds
from modicum.core.contracts.search_defaults import room_search
from modicum.core.contracts.search_ranges import FieldBounds
from modicum.core.contracts.travel import LOADS_IN, TravelForm, travel_form
from modicum.core.errors import InputError
from modicum.core.folder_words import holds


@dataclass(frozen=True)
class MethodRecord:
    """A method as the catalog knows it.

    Args:
        defaults: of its fields, `...` where a field has none.
        summary: the first line of its docstring.
        module: what it is imported as; None: by its path.
        own_search: what its class, or a base, says may be tuned; None: nothing.
    """

    info: Info
    file: Path
    class_name: str
    defaults: Mapping[str, Any]
    summary: str = ""
    module: str | None = None
    own_search: SearchTable | None = None
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
        return source_reading.fields(self.file, self._class)

    @functools.cached_property
    def meanings(self) -> Mapping[str, str]:
        """What the docstring says of each field, read from the file."""
        return source_reading.meanings(self.file, self._class)

    @functools.cached_property
    def description(self) -> list[str]:
        """What the docstring says after its first line, before `Args:`; a line a paragraph."""
        return source_reading.description(self._class)

    @property
    def _class(self) -> ast.ClassDef:
        for node in _classes(self.file):
            if node.name == self.class_name:
                return node
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

    @property
    def runs_file(self) -> bool:
        """Whether loading it runs a plugin, which this process has not run yet."""
        return self.module is None and _module_name(self.file) not in sys.modules

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

    @property
    def search(self) -> SearchTable:
        """What may be tuned: what the method says, and what its room says of all its methods."""
        room = room_search(self.info)
        return room if self.own_search is None else self.own_search.over(room)

    def bounds(self, name: str) -> FieldBounds:
        """The least and largest value of what its search table has under a name.

        Raises:
            InputError: the table has no such name.
        """
        if name not in self.search.fields:
            known = tuple(self.search.fields)
            problem = f"the search table of {self.name} has no such name"
            raise InputError(problem, value=name, allowed=", ".join(known), candidates=known)
        return field_bounds(RECIPE_FIELDS.get(name) or self.fields[name][0])

    @property
    def travel(self) -> TravelForm | None:
        """Where an adapter of its default fields can be used; None: it is no adapter."""
        return travel_form(self.traits({}))

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
            "loads_in": None if self.travel is None else LOADS_IN[self.travel],
            "traits": list(self.info.traits),
            "traits_if": [list(triple) for triple in self.info.traits_if],
            "traits_unless": [list(each) for each in self.info.traits_unless],
            "excludes": [list(pair) for pair in self.info.excludes],
            "fields": dict(self.defaults),
            "search": {"of": "room" if self.own_search is None else "method"}
            | self.search.as_json(),
        }


def read_file(path: str | Path, module: str | None = None) -> list[MethodRecord]:
    """The methods that a Python file defines, read from its syntax tree.

    Raises:
        InputError: no such file, a syntax error (with its line), classes that inherit from
            themselves, or an `info` or a field that cannot be read without running the file.
    """
    file = Path(path)
    if not file.is_file():
        if file.is_dir():
            hint = holds(file, (".py",))
            raise InputError(
                f"methods of your own are in a file, and this is a folder{hint}", file=file
            )
        raise InputError("no such file of methods", file=file)
    try:
        return [_record(file, node, module) for node in _classes(file)]
    except RecursionError:
        problem = "its classes inherit from each other in a circle"
        raise InputError(problem, file=file) from None


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
    table = _search(file, node, fields)
    record = MethodRecord(info, file, node.name, defaults, summary, module, table)
    record.__dict__["fields"] = fields  # the cached property's
    return record


def _search(
    file: Path, node: ast.ClassDef, fields: source_reading.DeclaredFields
) -> SearchTable | None:
    """The search table of a class; one that it inherits has the defaults that the class has.

    Raises:
        InputError: it is none, or it does not suit the fields; with the line.
    """
    found = source_reading.inherited(file, node, "search")
    if found is None:
        return None
    home, said = found
    table = source_reading.evaluate(said, source_reading.names(source_reading.parse(home)), home)
    if table is None:
        return None
    if not isinstance(table, SearchTable):
        problem = "`search` must be a SearchTable(...) of literals"
        raise InputError(problem, file=home, line=said.lineno)
    line = said.lineno
    if source_reading.assigned(node, "search") is None:
        table = table.fitted({name: default for name, (_, default) in fields.items()})
        line = node.lineno
    try:
        check_search(table, fields)
    except InputError as error:
        name = (error.field or "").rpartition(".")[2]
        words = (each for each in ast.walk(node) if isinstance(each, ast.Constant))
        lines = (each.lineno for each in words if each.value == name and each.lineno >= line)
        raise error.located(file=file, line=min(lines, default=line)) from None
    return table


def _module_name(file: Path) -> str:
    """What a plugin is imported as: files of one name in two folders are two modules."""
    digest = hashlib.sha256(bytes(file.resolve())).hexdigest()
    return f"modicum_plugin_{file.stem}_{digest[:8]}"


def _import(file: Path) -> Any:
    """Import a plugin by its path, once."""
    name = _module_name(file)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file.resolve())
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
