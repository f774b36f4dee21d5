"""What a public function was called with, where it is none of what it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modicum.core.errors import InputError


def check_type(
    value: object,
    kind: type | tuple[type, ...],
    argument: str,
    allowed: str,
    instead: Mapping[Any, str] | None = None,
) -> None:
    """Refuse an argument of another type, with what to write instead.

    Args:
        argument: the function and its argument, such as `plan(recipe)`.
        allowed: what it takes, in words.
        instead: what to write, for values of types that are likely.

    Raises:
        InputError: the value is of another type.

    >>> check_type(3, str, "open(path)", "a path")
    Traceback (most recent call last):
    modicum.core.errors.InputError: open(path): takes no int; allowed: a path
    """
    if isinstance(value, kind):
        return
    found = next((text for key, text in (instead or {}).items() if isinstance(value, key)), None)
    name = f"class ({value.__name__})" if isinstance(value, type) else type(value).__name__
    hint = "" if found is None else f"; write {found}"
    raise InputError(f"takes no {name}{hint}", field=argument, allowed=allowed)


def check_callable(value: object, argument: str) -> None:
    """Refuse what cannot be called, but for None.

    Raises:
        InputError: it cannot.
    """
    if value is not None and not callable(value):
        allowed = "a function of one event, or None"
        raise InputError(f"takes no {type(value).__name__}", field=argument, allowed=allowed)
