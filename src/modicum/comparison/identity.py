"""What a folder's study is of: another in the same folder is refused with the difference."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from modicum.comparison.space import Side
from modicum.core.errors import InputError

_SHOWN = 4  # differences in a message
_ABSENT = "nothing"
_RECIPES, _DIGEST = "recipes", ".fixed.recipe"  # of what is compared by runs


def checked_sides(sides: Sequence[Side]) -> tuple[Side, ...]:
    """The sides, if they can be compared.

    Raises:
        InputError: fewer than two take part, two have one name, or two are the same.
    """
    names = [side.name for side in sides]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError("two sides have this name", field="sides", value=twice[0])
    taking_part = [side for side in sides if not side.refusal]
    if len(taking_part) < 2:
        refused = "".join(f"; {one.name}: {one.refusal}" for one in sides if one.refusal)
        raise InputError(
            f"a comparison has two sides or more that can run{refused}",
            field="sides",
            value=[side.name for side in taking_part],
        )
    for place, side in enumerate(taking_part):
        for other in taking_part[:place]:
            if side.to_json() == other.to_json():
                raise InputError(
                    f"this is the same as {other.name}: neither ranges nor fixed settings differ",
                    field="sides",
                    value=side.name,
                )
    return tuple(sides)


def as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as JSON has them.

    Raises:
        InputError: one is no JSON value.
    """
    try:
        found: dict[str, Any] = json.loads(json.dumps(values, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"settings are JSON values: {error}", field="sides", allowed="numbers, texts, lists"
        ) from None
    return found


def refuse_other(there: Mapping[str, Any], here: Mapping[str, Any], file: Path) -> None:
    """Refuse a folder that was begun with another study.

    Raises:
        InputError: so it was; with what differs.
    """
    found = _in_words(list(_differences(there, here)))
    if found:
        more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise InputError(
            f"this folder holds another comparison ({'; '.join(found[:_SHOWN])}{more}); give it a "
            "folder of its own",
            file=file,
        )


def grown(name: str, there: object, here: int, file: Path) -> None:
    """Refuse fewer trials or seeds than were begun with.

    Raises:
        InputError: so it is.
    """
    if not isinstance(there, int) or here < there:
        raise InputError(
            f"this comparison has more {name}; they may grow", file=file, field=name, value=here,
            allowed=f"{there} or more",
        )  # fmt: skip


def _differences(
    there: object, here: object, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Paths of what differs, and how."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for key in dict.fromkeys([*there, *here]):
            inside = (*path, str(key))
            yield from _differences(there.get(key, _ABSENT), here.get(key, _ABSENT), inside)
    elif there != here:
        yield path, f"{_short(there)} there, {_short(here)} here"


def _in_words(found: Sequence[tuple[tuple[str, ...], str]]) -> list[str]:
    """Each difference once, with the sides whose recipes have it.

    A digest of a recipe is shown only where nothing else says what differs.
    """
    words: dict[str, list[str]] = {}
    for path, values in found:
        place = path.index(_RECIPES) if _RECIPES in path else len(path)
        own = path[place + 2 :]  # in a side's recipe
        sides = words.setdefault(f"{'.'.join(own or path)}: {values}", [])
        sides += [path[place + 1]] if own else []
    spoken = [text for text in words if not text.partition(":")[0].endswith(_DIGEST)]
    return [
        f"{text} ({', '.join(words[text])})" if words[text] else text for text in spoken or words
    ]


def _short(value: object) -> str:
    if value == _ABSENT:
        return _ABSENT
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
