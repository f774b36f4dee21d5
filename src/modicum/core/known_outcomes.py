"""What training ended with, kept in the user's cache under all that it depends on.

An entry is known by the recipe, modicum's sources, versions and the machine. So a figure from here
is the one that training again would give. Times are never kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

import modicum
from modicum.core.errors import InputError
from modicum.core.files import read_json, user_cache, write_json

T = TypeVar("T")


def known_outcome(
    kind: type[T],
    recipe: Mapping[str, Any],
    train: Callable[[], T],
    *,
    folder: str,
    sources: str,
    fresh: bool = False,
) -> tuple[T, bool]:
    """What training by a recipe ends with, and whether it was known.

    Args:
        kind: the class of what it ends with: losses, counts and bytes.
        recipe: all that decides the outcome next to sources, versions and machine; each value is
            represented by its class and its `repr`.
        train: makes it where it is not known. What it raises is not kept.
        folder: in the user's cache.
        sources: a digest of the code that decides the outcome (`sources_digest`).
        fresh: make it in any case.
    """
    from modicum.core.machine import versions
    from modicum.core.machine.identity import depends_on

    key = {
        "kind": kind.__qualname__,
        "recipe": {name: described(value) for name, value in recipe.items()},
        "sources": sources,
        "versions": versions(),
        "machine": depends_on(),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    file = user_cache(folder) / f"{digest[:32]}.json"
    adapter = TypeAdapter(kind)
    with suppress(InputError, ValidationError, KeyError, TypeError):
        if not fresh:
            return adapter.validate_python(read_json(file)["outcome"]), True
    outcome = train()
    with suppress(OSError, InputError):  # trained again next time, then
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"key": key, "outcome": adapter.dump_python(outcome, mode="json")})
    return outcome, False


def described(value: object) -> str:
    """A value by its class and its `repr`, which for a method has its fields alone.

    >>> described(3)
    'int 3'
    """
    return f"{type(value).__qualname__} {value!r}"


@cache
def sources_digest() -> str:
    """A digest of modicum's own files."""
    root, digest = Path(modicum.__file__).parent, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()
