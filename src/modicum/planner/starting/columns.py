"""Which columns of a file of rows hold what is learned, and what comes before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import mean
from typing import Any

from modicum.core.errors import InputError
from modicum.data.row_files import rows_of
from modicum.data.row_formats import Format, format_of
from modicum.data.sources import Source

# Names that say what a column holds, the plainest first.
PROMPTS = ("prompt", "question", "query", "instruction", "input", "source", "user", "problem")
ANSWERS = (
    *("completion", "response", "answer", "output", "target", "reply", "assistant", "solution"),
    *("summary", "label_text"),
)
TEXTS = ("text", "content", "document", "body", "code", "article", "story", "sentence", "passage")
LOOKED_AT = 50  # rows
_LEAST = 20  # characters, of a column that is taken for text


@dataclass(frozen=True)
class FoundColumns:
    """What was found in the first rows.

    Args:
        format: of the rows.
        column, prompt_column: of the format `text`.
        sure: whether names or the format say so; else it is the longest column.
        texts: the columns of strings.
        unread: columns that nothing is made of.
    """

    format: Format
    column: str = "text"
    prompt_column: str | None = None
    sure: bool = True
    texts: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


def columns_of(source: Source) -> FoundColumns | None:
    """The columns of a source's first rows; None of a source of text files.

    Raises:
        InputError: no column holds text, or the rows cannot be read.
    """
    rows = first_rows(source)
    if not rows:
        return None  # text, or an empty file, which is refused when its text is read
    known = format_of(rows[0])
    if known != "text":
        return FoundColumns(known)
    return _text_columns(rows, source)


def first_rows(source: Source) -> list[Mapping[str, Any]]:
    """The columns of the first rows of a source's first file that has any; none of text files.

    Raises:
        InputError: the rows cannot be read.
    """
    for file in source.files:
        if file.row_kind is not None:
            return [row.columns for row in islice(rows_of(file.path, file.row_kind), LOOKED_AT)]
    return []


def _text_columns(rows: Sequence[Mapping[str, Any]], source: Source) -> FoundColumns:
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = {name: [row.get(name) for row in rows] for name in names}
    strings = {name: [c for c in found if isinstance(c, str)] for name, found in cells.items()}
    texts = [name for name in names if len(strings[name]) == len(rows)]
    lengths = {name: mean(map(len, strings[name])) for name in texts}
    plain = {name.lower(): name for name in texts}
    prompt = next((plain[name] for name in PROMPTS if name in plain), None)
    answer = next((plain[name] for name in ANSWERS if name in plain), None)
    text = next((plain[name] for name in TEXTS if name in plain), None)

    def made(column: str, before: str | None = None, sure: bool = True) -> FoundColumns:
        unread = tuple(name for name in names if name not in (column, before))
        return FoundColumns("text", column, before, sure, tuple(texts), unread)

    if "text" in texts:
        return made("text")
    if prompt and answer:
        return made(answer, prompt)
    if text:
        return made(text)
    worded = [name for name in texts if lengths[name] >= _LEAST]
    if len(texts) == 1 and (worded or answer):
        return made(texts[0])
    if worded:
        return made(max(worded, key=lengths.__getitem__), sure=False)
    raise InputError(
        "no column holds text to learn; name one with `--set data.column=NAME`",
        file=source.title,
        value=", ".join(names),
        allowed="`messages`, `prompt` and `completion`, Alpaca's columns, or `text`",
    )
