"""A draft as the text of a recipe: YAML with the reason of each value next to it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from modicum.planner.starting.draft import Setting
from modicum.recipe import Recipe

_WIDTH = 100
_COMMENTS = 34  # where they begin, where the value leaves room


def recipe_text(settings: Iterable[Setting]) -> str:
    """The sections of a recipe, in the recipe's order.

    >>> print(recipe_text([Setting("budget.memory", "8GB", "as asked for")]), end="")
    budget:
      memory: "8GB"                   # as asked for
    """
    sections: dict[str, list[Setting]] = {name: [] for name in Recipe.model_fields}
    for setting in settings:
        sections[setting.field.partition(".")[0]].append(setting)
    lines = []
    for name, held in sections.items():
        inner = [setting for setting in held if "." in setting.field]
        for setting in held:
            if "." not in setting.field:
                lines += _lines(f"{name}: {_spelled(setting.value)}", setting.why, "")
        if inner:
            lines.append(f"{name}:")
        for setting in inner:
            field = setting.field.partition(".")[2]
            lines += _lines(f"  {field}: {_spelled(setting.value)}", setting.why, "  ")
    return "".join(f"{line}\n" for line in lines)


def model_words(found: Mapping[str, Any]) -> str:
    """What was found of a model, in a line."""
    size = f"{found['parameters']:,} parameters"
    if found["path"] is None:
        return f"a new one of {size}"
    stored = f" in {found['dtype']}" if found["dtype"] and found["weights"] else ""
    missing = "" if found["weights"] else "; no weights are here, which is enough for a plan alone"
    return f"{found['path']}, {size}{stored}, context {found['context']:,}{missing}"


def _lines(text: str, why: str, indent: str) -> list[str]:
    """A field with its comment next to it, or above it where the line would be too long."""
    why = "".join(c if c.isprintable() else " " for c in why)
    if not why:
        return [text]
    line = f"{text:<{_COMMENTS}}# {why}"
    if len(text) >= _COMMENTS:
        line = f"{text}  # {why}"
    return [line] if len(line) <= _WIDTH else [*_above(why, indent), text]


def _above(why: str, indent: str) -> list[str]:
    lines, line = [], ""
    for word in why.split():
        if line and len(indent) + len(line) + len(word) + 3 > _WIDTH:
            lines.append(f"{indent}# {line}")
            line = word
        else:
            line = f"{line} {word}".strip()
    return [*lines, f"{indent}# {line}"]


def _spelled(value: Any) -> str:
    """A value in YAML, which JSON is; numbers as people write them."""
    if isinstance(value, float):
        return repr(value).removesuffix(".0").replace("e-0", "e-")
    return json.dumps(value, ensure_ascii=False)
