"""What a method is and takes: `modicum methods NAME`."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from typing import TextIO

from modicum.cli.tables import TableRow, print_json, table
from modicum.core.contracts.method_record import MethodRecord
from modicum.core.contracts.travel import MEANINGS
from modicum.recipe.schema_words import words_of
from modicum.recipe.slots import slot_of


def print_method(record: MethodRecord, as_json: bool, stream: TextIO | None = None) -> None:
    """Print a method's source, claim and verdict, then its fields as a recipe has them."""
    stream = stream or sys.stdout
    if as_json:
        print_json(record.as_json() | {"meanings": dict(record.meanings)}, stream)
        return
    table(("Method", record.name), _facts(record), stream=stream)
    if record.fields:
        stream.write("\n")
        table(("Field", "Takes", "Default", "Meaning"), list(_fields(record)), stream=stream)


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
