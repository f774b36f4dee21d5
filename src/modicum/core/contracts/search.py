"""What of a method may be tuned: which fields, over which values, on which scale.

A method's class says it in one literal next to `info`, so the catalog reads it without importing
the file; whoever tunes asks `MethodRecord.search`, which adds what its room has. Nothing here
imports torch or pydantic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from modicum.core.contracts.search_discrete import IntegerRange as IntegerRange
from modicum.core.contracts.search_discrete import SearchChoice as SearchChoice
from modicum.core.contracts.search_ranges import LinearRange as LinearRange
from modicum.core.contracts.search_ranges import LogRange as LogRange
from modicum.core.errors import InputError

SearchRange = LogRange | LinearRange | IntegerRange | SearchChoice
_KINDS: dict[str, type[SearchRange]] = {
    kind.kind: kind for kind in (LogRange, LinearRange, IntegerRange, SearchChoice)
}


@dataclass(frozen=True)
class SearchTable:
    """What of a method may be tuned, and over which values.

    A name is that of a field of the method, or one of the recipe's: `learning_rate`, `warmup` (a
    part of all updates), `weight_decay`, `batch_size`. These mean the recipe's also where the
    method has such a field. Each value of a range is one that the method takes with its other
    fields as they are by default; of two that are changed together it may refuse some, which a
    search counts as tried and without result.

    Args:
        fields: a range by name. Its default is the field's own, where that is a field of the method
            and not null.
        size: the one of these that sets how large the method is (`rank`), which a comparison at
            equal size does not tune; None: it has no such field.

    Raises:
        InputError: a range is none, or `size` is not among the fields.

    >>> table = SearchTable({"rank": IntegerRange(1, 64, 8, log=True)}, size="rank")
    >>> table.fields["rank"].grid(3), list(table.tuned)
    ((1, 8, 64), [])
    """

    fields: Mapping[str, SearchRange] = field(default_factory=dict, hash=False)
    size: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.fields, Mapping):
            raise InputError("expected ranges by name", field="search", value=self.fields)
        given: Mapping[str, object] = self.fields
        for name, known in given.items():
            if not isinstance(known, SearchRange):
                kinds = ", ".join(kind.__name__ for kind in _KINDS.values())
                raise InputError("is no range", field=f"search.{name}", value=known, allowed=kinds)
        if self.size is not None and self.size not in self.fields:
            raise InputError(
                "sets the size, so it must have a range",
                field="search.size",
                value=self.size,
                allowed=", ".join(self.fields) or "none, as there is no range",
                candidates=tuple(self.fields),
            )
        object.__setattr__(self, "fields", dict(self.fields))

    @property
    def tuned(self) -> dict[str, SearchRange]:
        """The ranges without that of the size."""
        return {name: known for name, known in self.fields.items() if name != self.size}

    def over(self, room: SearchTable) -> SearchTable:
        """This table, and what a room's has in addition; the learning rate is first in any case."""
        first = {name: known for name, known in room.fields.items() if name == "learning_rate"}
        return SearchTable({**first, **self.fields, **_without(room, self)}, self.size)

    def fitted(self, defaults: Mapping[str, Any]) -> SearchTable:
        """The table for a class that inherits it and has other defaults than its base.

        A range gets the default that the class has; where it does not hold that it is left out.
        """
        made = {
            name: known if name not in defaults else _with_default(known, defaults[name])
            for name, known in self.fields.items()
        }
        kept = {name: known for name, known in made.items() if known is not None}
        return SearchTable(kept, self.size if self.size in kept else None)

    def as_json(self) -> dict[str, Any]:
        """The table as plain values: what `modicum methods --json` prints of it.

        >>> SearchTable({"learning_rate": LogRange(1e-4, 1e-1, 1e-3)}).as_json()["fields"]
        {'learning_rate': {'kind': 'log', 'low': 0.0001, 'high': 0.1, 'default': 0.001}}
        """
        fields = {name: known.as_json() for name, known in self.fields.items()}
        return {"size": self.size, "fields": fields}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SearchTable:
        """The table of which these are the plain values.

        Raises:
            InputError: they are those of none.
        """
        try:
            fields = {name: range_from_json(each) for name, each in values["fields"].items()}
            return cls(fields, values["size"])
        except (KeyError, TypeError, AttributeError):
            raise InputError("these are no values of a search table", value=values) from None


def range_from_json(values: Mapping[str, Any]) -> SearchRange:
    """The range of which these are the plain values.

    Raises:
        InputError: they are those of none.

    >>> range_from_json({"kind": "linear", "low": 0.0, "high": 0.1, "default": 0.0})
    LinearRange(low=0.0, high=0.1, default=0.0)
    """
    given = dict(values)
    kind = _KINDS.get(given.pop("kind", None))
    if kind is None:
        allowed = ", ".join(_KINDS)
        raise InputError("no kind of range", value=values.get("kind"), allowed=allowed)
    if kind is SearchChoice:
        given = {name: _tuples(each) for name, each in given.items()}
    return kind(**given)


def _tuples(value: Any) -> Any:
    """Lists as tuples, which JSON does not have."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _without(table: SearchTable, other: SearchTable) -> dict[str, SearchRange]:
    return {name: known for name, known in table.fields.items() if name not in other.fields}


def _with_default(known: SearchRange, default: Any) -> SearchRange | None:
    if default is None or default is ...:
        return known
    try:
        return replace(known, default=default)
    except InputError:
        return None
