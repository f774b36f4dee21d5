"""What a method is and takes: `modicum methods NAME`."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from modicum.cli.tables import TableRow, print_json, table
from modicum.core.contracts.method_record import MethodRecord
from modicum.core.contracts.search import IntegerRange, LogRange, SearchChoice, SearchRange
from modicum.core.contracts.travel import MEANINGS
from modicum.recipe.schema_words import words_of
from modicum.recipe.searched import search_json
from modicum.recipe.slots import slot_of


def print_method(record: MethodRecord, as_json: bool, stream: TextIO | None = None) -> None:
    """Print a method's source, claim and verdict, its fields, and over which values to tune it."""
    stream = stream or sys.stdout
    if as_json:
        print_json(method_json(record) | {"meanings": dict(record.meanings)}, stream)
        return
    table(("Method", record.name), _facts(record), stream=stream)
    if record.fields:
        stream.write("\n")
        table(("Field", "Takes", "Default", "Meaning"), list(_fields(record)), stream=stream)
    if record.search.fields:
        stream.write("\n")
        headers = ("To tune", "In a recipe", "Values", "Scale", "Default")
        table(headers, list(search_rows(record)), stream=stream)
        if record.search.size is not None:
            stream.write(f"{record.search.size} sets its size.\n")
        if record.own_search is None:
            stream.write("The method has no search table of its own; this is that of its room.\n")


def method_json(record: MethodRecord) -> dict[str, Any]:
    """What `modicum methods --json` prints of a method."""
    return record.as_json() | {"search": search_json(record)}


def _facts(record: MethodRecord) -> list[TableRow]:
    info, slot = record.info, slot_of(record)
    return [
        ("title", record.title),
        ("what", record.summary),
        ("in a recipe", f"{slot}: {{method: {record.name}}}" if slot else "not by itself"),
        ("in Python", _in_python(record)),
        ("source", info.paper),
        ("claim", info.claim),
        *([] if record.travel is None else [("loads in", MEANINGS[record.travel])]),
        ("status", record.status),
        ("proof", f"modicum prove {record.name}"),
    ]


def _in_python(record: MethodRecord) -> str:
    """How a script gets the class."""
    package = ".".join((record.module or "").split(".")[:2])
    if package and record.class_name in dir(importlib.import_module(package)):
        return f"from {package} import {record.class_name}"
    return f"class {record.class_name} in {record.module or record.file}"


def _fields(record: MethodRecord) -> Iterator[TableRow]:
    schema = record.model.model_json_schema()
    for name, (_, default) in record.fields.items():
        shown = "required" if default is ... else json.dumps(default)  # as YAML has it too
        takes = words_of(schema["properties"][name], schema).replace("`", "")
        yield name, takes, shown, record.meanings.get(name, "")


def range_words(known: SearchRange) -> tuple[str, str]:
    """The values of a range, and its scale.

    >>> range_words(LogRange(1e-4, 1e-1, 1e-3)), range_words(SearchChoice((2, 4), 4))
    (('0.0001 to 0.1', 'log'), ('2, 4', 'choice'))
    """
    if isinstance(known, SearchChoice):
        return ", ".join(map(_as_yaml, known.values)), "choice"
    if isinstance(known, IntegerRange):
        steps = "integers" if known.step == 1 else f"by {known.step}"
        return f"{known.low} to {known.high}", f"{'log' if known.log else 'linear'}, {steps}"
    return f"{known.low:g} to {known.high:g}", "log" if isinstance(known, LogRange) else "linear"


def search_rows(record: MethodRecord) -> Iterator[TableRow]:
    """Of each range in a method's search table: name, field of a recipe, values, scale, default."""
    fields = search_json(record)["fields"]
    for name, known in record.search.fields.items():
        yield name, fields[name].get("path"), *range_words(known), _as_yaml(known.default)


def _as_yaml(value: Any) -> str:
    """A plain value as YAML has it: a word without quotes."""
    return value if isinstance(value, str) else json.dumps(value)
