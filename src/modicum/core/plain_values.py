"""Values of dataclasses as JSON, and back: what one process tells another one that it started.

Of a stranger's text nothing is made by this: it imports the classes that the text names. And what
every reader of JSON takes: numbers that are finite.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from modicum.core.errors import InputError

_CLASS, _TUPLE, _MAPPING = "class", "tuple", "mapping"
_PLAIN = (bool, int, float, str, type(None))


def finite(value: Any) -> Any:
    """`value` with every NaN and infinity inside it replaced by None, so that it is strict JSON.

    >>> finite({"a": [float("inf"), 1]})
    {'a': [None, 1]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def as_plain(value: Any) -> Any:
    """Dataclasses, mappings with texts for keys, tuples and lists as JSON has them.

    Raises:
        InputError: something in it is none of these, nor a number, text, truth value or None.

    >>> from modicum.core.ranks.layout import Layout
    >>> from_plain(as_plain((1, Layout(shards=2))))
    (1, Layout(replicas=1, shards=2, copies=False))
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list):
        return [as_plain(each) for each in value]
    if isinstance(value, tuple):
        return {_TUPLE: [as_plain(each) for each in value]}
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {_MAPPING: {name: as_plain(each) for name, each in value.items()}}
    kind = type(value)
    if is_dataclass(kind) and "<" not in kind.__qualname__:
        own = [field.name for field in fields(kind) if field.init]
        named = {name: as_plain(getattr(value, name)) for name in own}
        return {_CLASS: f"{kind.__module__}:{kind.__qualname__}", **named}
    raise InputError(
        "a value of this class cannot be given to another process",
        value=kind.__qualname__,
        allowed="dataclasses at the top of a module, mappings, lists, tuples and plain values",
    )


def from_plain(raw: Any) -> Any:
    """The value that `as_plain` wrote."""
    if isinstance(raw, list):
        return [from_plain(each) for each in raw]
    if not isinstance(raw, dict):
        return raw
    if _CLASS not in raw:
        if _TUPLE in raw:
            return tuple(from_plain(each) for each in raw[_TUPLE])
        return {name: from_plain(each) for name, each in raw[_MAPPING].items()}
    module, _, name = raw[_CLASS].partition(":")
    kind: Any = importlib.import_module(module)
    for part in name.split("."):
        kind = getattr(kind, part)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise InputError("is no dataclass", value=raw[_CLASS])
    return kind(**{key: from_plain(each) for key, each in raw.items() if key != _CLASS})
