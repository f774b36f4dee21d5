from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modicum.core.errors import InputError
from modicum.data.sources import open_source
from modicum.planner.starting.columns import FoundColumns, columns_of

LONG = "a sentence of some words that is long enough"


def found(folder: Path, *rows: dict[str, Any]) -> FoundColumns | None:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return columns_of(open_source(file))


@pytest.mark.parametrize(
    ("row", "column", "prompt"),
    [
        ({"text": "x", "question": LONG, "answer": LONG}, "text", None),
        ({"Question": "why", "Answer": "so"}, "Answer", "Question"),
        ({"instruction": "do", "context": "", "response": "done"}, "response", "instruction"),
        ({"content": "x", "url": LONG}, "content", None),
        ({"id": 3, "poem": LONG}, "poem", None),
    ],
)
def test_names_say_which_column_is_learned(
    tmp_path: Path, row: dict[str, Any], column: str, prompt: str | None
) -> None:
    made = found(tmp_path, row)
    assert made is not None
    assert (made.format, made.column, made.prompt_column) == ("text", column, prompt)
    assert made.sure
    assert set(made.unread) == set(row) - {column, prompt}


def test_a_format_of_conversations_is_found_as_a_run_finds_it(tmp_path: Path) -> None:
    made = found(tmp_path, {"messages": [{"role": "user", "content": "hi"}]})
    assert made is not None
    assert made.format == "messages"


def test_the_longest_column_is_a_guess(tmp_path: Path) -> None:
    made = found(tmp_path, {"a": LONG, "b": LONG * 2, "c": 1})
    assert made is not None
    assert (made.column, made.sure, made.texts) == ("b", False, ("a", "b"))


@pytest.mark.parametrize("row", [{"a": 1, "b": 2}, {"a": "1", "b": "2"}, {"text": None}])
def test_rows_without_text_are_refused(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="no column holds text") as caught:
        found(tmp_path, row)
    assert caught.value.value == ", ".join(row)


def test_text_files_have_no_columns(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    assert columns_of(open_source(tmp_path)) is None
