"""The file of promises: a sentence, a command, which of its figures counts, and the bar for it."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from modicum.core.contracts.method import describe
from modicum.core.errors import InputError
from modicum.core.files import read_text
from modicum.recipe_yaml import parse

BAR_FORMAT = "a relation and a value: '< 0.3', '>= 0.98', '== 0', '== holds'"
_RELATIONS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
}


class FigurePlace(BaseModel):
    """Where a command leaves a figure: a dotted key of the JSON in a file, or on its output.

    In a list of rows, such as a proof's criteria, it names the row by its sentence or name:
    `criteria.peak of an update.figure`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    key: str
    file: str | None = None


class Promise(BaseModel):
    """One promise, as the file spells it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: str
    sentence: str
    command: str
    figure: FigurePlace
    bar: str
    unit: str = ""
    long: bool = False
    """Too long to be run by default: then its committed result is read."""
    takes: str = ""
    """About how long the command takes, for people."""
    readme: str = ""
    """The sentence in README's table, which has only those that have one."""

    @field_validator("bar")
    @classmethod
    def _readable(cls, bar: str) -> str:
        relation, _, value = bar.partition(" ")
        if relation not in _RELATIONS or not value:
            raise ValueError(f"not a bar; write {BAR_FORMAT}")
        return bar

    def kept(self, figure: object) -> bool:
        """Whether the figure clears the bar; one of another type than the bar's never does.

        Truth values are `true` and `false`, as in JSON.
        """
        relation, _, text = self.bar.partition(" ")
        try:
            bar: object = float(text)
        except ValueError:
            bar = text
        if isinstance(figure, bool):
            figure = json.dumps(figure)
        if not isinstance(figure, int | float | str) or isinstance(figure, str) != (bar is text):
            return False
        return _RELATIONS[relation](figure, bar)


def read_promises(file: Path) -> list[Promise]:
    """The promises of a file, in its order.

    Raises:
        InputError: it is missing or no list of promises, with what is wrong in which.
    """
    if not os.path.lexists(file):
        raise InputError(
            "there is no such file; promises are checked in a checkout of modicum", file=file
        )
    entries, _ = parse(read_text(file), file, mapping=False)
    if not isinstance(entries, list):
        raise InputError("expected a list of promises", file=file)
    promises = []
    for number, entry in enumerate(entries, start=1):
        try:
            promises.append(Promise.model_validate(entry))
        except ValidationError as error:
            known = Promise.model_fields
            raise describe(error, known, prefix=f"promise {number}: ", file=file) from None
    ids = [promise.id for promise in promises]
    for promise in promises:
        if ids.count(promise.id) > 1:
            raise InputError("two promises have this id", file=file, field="id", value=promise.id)
        _check_long(promise, promises, file)
    return promises


def _check_long(promise: Promise, promises: list[Promise], file: Path) -> None:
    """What is read instead of run needs a file, and all promises of its command are read too."""
    where = f"promise {promise.id}: "
    if promise.long and promise.figure.file is None:
        problem = "a long command's figure is read from a committed file; name it"
        raise InputError(where + problem, file=file, field="figure.file")
    if promise.long and not promise.takes:
        problem = "say about how long its command takes: '15 min'"
        raise InputError(where + problem, file=file, field="takes")
    for other in promises:
        if (other.command, not other.long) == (promise.command, promise.long):
            problem = f"its command is {promise.id}'s too, and only one of them is long"
            raise InputError(f"promise {other.id}: {problem}", file=file, field="long")
