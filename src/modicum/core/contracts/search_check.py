"""A search table held to the fields of its method, and how far these let a range be widened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from modicum.core.contracts.method import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Probability,
    describe,
)
from modicum.core.contracts.search import SearchRange, SearchTable
from modicum.core.contracts.search_ranges import FieldBounds
from modicum.core.errors import InputError

# Names of a table that are the recipe's, and what its fields take; `recipe.searched` has the paths.
RECIPE_FIELDS: dict[str, Any] = {
    "learning_rate": PositiveFloat,
    "warmup": Probability,
    "weight_decay": NonNegativeFloat,
    "batch_size": PositiveInt,
}
_TRIED = 9  # values of a range that are tried on the field


def check_search(table: SearchTable, declared: Mapping[str, tuple[Any, Any]]) -> None:
    """Make sure that a table suits the fields of its method, or those of the recipe.

    Args:
        declared: the method's, each with its type and its default (`...`: it has none).

    Raises:
        InputError: a name is neither; a value is out of the field's bounds; or the default is not
            the field's own. Its field is `search.NAME`.
    """
    for name, known in table.fields.items():
        if name in RECIPE_FIELDS:
            _check_values(name, known, RECIPE_FIELDS[name])
            continue
        if name not in declared:
            names = (*declared, *RECIPE_FIELDS)
            raise InputError(
                "neither a field of the method nor one of the recipe's names",
                field=f"search.{name}",
                word=name,
                allowed=", ".join(names),
                candidates=names,
            )
        kind, default = declared[name]
        _check_values(name, known, kind)
        if default is not None and default is not ... and default != known.default:
            raise InputError(
                f"the field's own default is {default!r}, and that of its range must be the same",
                field=f"search.{name}",
                value=known.default,
            )


def _check_values(name: str, known: SearchRange, kind: Any) -> None:
    adapter = _adapter(kind)
    for value in known.grid(_TRIED):
        try:
            adapter.validate_python(value)
        except ValidationError as error:
            raise describe(error, (), prefix=f"search.{name}") from None


def field_bounds(kind: Any) -> FieldBounds:
    """The least and largest number of an annotated type.

    >>> field_bounds(PositiveFloat | None)
    FieldBounds(low=0, high=None, low_open=True, high_open=False)
    """
    schema = _adapter(kind).json_schema()
    for option in (schema, *schema.get("anyOf", ())):
        if option.get("type") in ("number", "integer"):
            low = option.get("minimum", option.get("exclusiveMinimum"))
            high = option.get("maximum", option.get("exclusiveMaximum"))
            opens = "exclusiveMinimum" in option, "exclusiveMaximum" in option
            return FieldBounds(low, high, *opens)
    return FieldBounds()


def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=ConfigDict(strict=True))
