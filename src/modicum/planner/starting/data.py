"""The fields of `data` that looking at files gives: which are read, and which of their columns."""

from __future__ import annotations

from typing import Any

from modicum.core.errors import InputError
from modicum.data.hub import PREFIX
from modicum.data.sources import open_source
from modicum.planner.starting.columns import FoundColumns, columns_of
from modicum.planner.starting.draft import Draft, OpenQuestion
from modicum.planner.starting.splits import split_of

_SOURCES = "data.sources"
_NAMED = ("data.column", "data.prompt_column", "data.format")


def chosen_data(draft: Draft, path: str | None) -> None:
    """Set what is trained on, and what lies next to it to evaluate on."""
    if _SOURCES in draft.asked:
        return
    if path is None:
        draft.set("data.path", None, "Python's standard library on this machine")
        return
    chosen = "data.include" in draft.asked or "data.exclude" in draft.asked
    train, validation = (path, None) if chosen else split_of(path)
    draft.set("data.path", train, "")
    if validation is not None and "data.validation_fraction" not in draft.asked:
        draft.set("data.validation_path", validation, "found next to it")


def look_at_columns(draft: Draft) -> dict[str, Any]:
    """Set the columns of rows; the format and the columns as plain values, empty of text.

    Raises:
        InputError: the data is not there or cannot be read, or no column holds text; or it is to be
            streamed from the hub.
    """
    if _SOURCES in draft.asked:
        return {"path": None}
    data = draft.recipe().data
    if data.streaming and str(data.path).startswith(PREFIX):
        raise InputError(
            "the data is read here to see how long its rows are, and a data set of the hub that is "
            "streamed is not; leave this out, and write it into the file afterwards",
            field="data.streaming",
            value=True,
        )
    source = open_source(data.path, include=data.include, exclude=data.exclude)
    try:
        found = None if any(name in draft.asked for name in _NAMED) else columns_of(source)
    except InputError as error:
        raise error.located(field="data.path") from None
    if found is not None:
        _set_columns(draft, found)
    made = draft.recipe().data
    if source.continuous:
        return {"path": made.path}
    return {
        "path": made.path, "format": made.format, "column": made.column,
        "prompt_column": made.prompt_column,
    }  # fmt: skip


def _set_columns(draft: Draft, found: FoundColumns) -> None:
    if found.format != "text":
        draft.set("data.format", found.format, "found in the first row")
        return
    unread = f"; not read: {', '.join(found.unread)}" if found.unread else ""
    if not found.sure:
        question = OpenQuestion(
            "data.column", "Which column holds the text to learn?", found.column, found.texts
        )
        draft.question(question, f"a guess: the longest of the columns{unread}")
        return
    draft.set("data.column", found.column, f"what is learned{unread}")
    if found.prompt_column is not None:
        draft.set("data.prompt_column", found.prompt_column, "comes before it, and is not learned")
