"""What a run trained, on what, and by which methods, as its recipe says."""

from __future__ import annotations

from typing import Any

from modicum.core.files import JsonObject
from modicum.recipe import SLOTS
from modicum.report import numbers
from modicum.report.folder import section

# Sections that the subject has words of its own for, and what a recipe has that names no method.
_APART = ("task", "adapter", "diagnosis")
_PLAIN = {"optimizer": "adamw"}


def subject(recipe: JsonObject, begun_in: Any = None) -> dict[str, str]:
    """The words for `model`, `data` and `method`, and `others`: methods of other sections.

    Args:
        begun_in: the folder in which the run was begun; paths in it are shown as seen from there.

    >>> task = {"method": "images", "data": "digits"}
    >>> said = subject({"task": task, "comm": {"method": "powersgd"}})
    >>> said["model"], said["data"], said["method"], said["others"]
    ('a new model of the task images', 'digits', 'full training', 'comm powersgd')
    """

    def named(part: Any, *keys: str) -> str:
        if isinstance(part, str):
            return part
        values = [part.get(key) for key in keys] if isinstance(part, dict) else []
        value = next((each for each in values if isinstance(each, str)), "")
        above = f"{begun_in}/" if isinstance(begun_in, str) else ""
        return value.removeprefix(above) or value

    rank = numbers.number(section(recipe, "adapter").get("rank"))
    method = named(recipe.get("adapter"), "method")
    if method and rank is not None:
        method += f" (rank {rank})"
    model = named(recipe.get("model"), "path")
    data = named(recipe.get("data"), "path")
    if task := named(recipe.get("task"), "method"):
        own = section(recipe, "task")
        model = model or named(own, "path") or f"a new model of the task {task}"
        data = data or named(own, "data_path", "data")
    found = {slot: named(recipe.get(slot), "method") for slot in SLOTS if slot not in _APART}
    others = [
        f"{slot} {name}" for slot, name in found.items() if name not in ("", _PLAIN.get(slot))
    ]
    return {
        "model": model or _new_decoder(section(recipe, "model")),
        "data": data or _library(recipe),
        "method": method or ("full training" if recipe else ""),
        "others": ", ".join(others),
    }


def _new_decoder(model: JsonObject) -> str:
    layers, width = numbers.number(model.get("layers")), numbers.number(model.get("width"))
    if layers is None or width is None:
        return ""
    return f"a new decoder, {layers} block{'s' if layers != 1 else ''} of width {width}"


def _library(recipe: JsonObject) -> str:
    """Where texts come from that no path names."""
    data = section(recipe, "data")
    unnamed = "path" in data and data["path"] is None and not data.get("sources")
    return "the Python standard library" if unnamed and not recipe.get("task") else ""
