"""The JSON schema of recipes, for editors: its sections, and every method in its slot."""

from __future__ import annotations

import ast
import inspect
import itertools
from functools import cache
from typing import Any

from modicum.core.contracts import source_reading
from modicum.recipe import SLOTS, Recipe, methods_for
from modicum.recipe.slots import DEFAULTS


def json_schema() -> dict[str, Any]:
    """The recipe's JSON schema, for editors: with every method of the catalog in its slot."""
    schema = Recipe.model_json_schema()
    for name, described in {"Recipe": schema, **schema["$defs"]}.items():
        for field, text in _docstrings(name).items():
            described["properties"][field]["description"] = text
    for slot in SLOTS:
        choices = []
        for record in methods_for(slot).values():
            choice = record.model.model_json_schema()
            for field, text in record.meanings.items():
                if field in choice["properties"]:  # of an optimizer, `lr` is the run's
                    choice["properties"][field]["description"] = text
            choice["properties"] = {"method": {"const": record.name}} | choice["properties"]
            choice |= {"required": _required(slot, record.name), "title": record.name}
            choice["description"] = record.title
            choices.append(choice)
        section = schema["properties"][slot]
        needed = slot in DEFAULTS
        schema["properties"][slot] = {
            "anyOf": choices if needed else [*choices, {"type": "null"}],
            "default": section["default"] if needed else None,
            "description": section.get("description", ""),
        }
    return schema


@cache
def _docstrings(class_name: str) -> dict[str, str]:
    """What stands below each field of a class of the recipe: read here, as pydantic takes long."""
    found: dict[str, str] = {}
    for file in sorted((source_reading.SOURCES / "recipe").glob("*.py")):
        for node in source_reading.parse(file).body:
            if isinstance(node, ast.ClassDef) and node.name == class_name:
                for item, after in itertools.pairwise(node.body):
                    if isinstance(item, ast.AnnAssign) and isinstance(after, ast.Expr):
                        text = inspect.cleandoc(ast.literal_eval(after.value))
                        found[ast.unparse(item.target)] = text
    return found


def _required(slot: str, name: str) -> list[str]:
    """What a section must say to mean this method."""
    return [] if DEFAULTS.get(slot) == name else ["method"]
