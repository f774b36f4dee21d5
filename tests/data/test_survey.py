"""What packing will make of a source: a process looks at the same files once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modicum.data import survey as module
from modicum.data.sources import open_source
from modicum.data.survey import DataSurvey, survey


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each time that documents are read."""
    found: list[int] = []
    first = module._first

    def counted(*given: Any) -> Any:
        found.append(1)
        return first(*given)

    monkeypatch.setattr(module, "_KNOWN", type(module._KNOWN)())
    monkeypatch.setattr(module, "_first", counted)
    return found


def looked_at(path: Path, **fields: Any) -> DataSurvey:
    given = {"vocabulary_size": 260, "sequence_length": 8, "boundaries": True, "too_long": "split"}
    return survey(open_source(str(path)), None, **(given | fields))


def test_the_same_files_are_read_once_and_nobody_shares_what_was_found(
    tmp_path: Path, reads: list[int]
) -> None:
    file = tmp_path / "text.txt"
    file.write_text("to be or not to be\n" * 40)
    one, other = looked_at(file), looked_at(file)
    assert one == other
    assert len(reads) == 1
    one.left_out.empty += 5
    assert looked_at(file) == other
    assert looked_at(file, sequence_length=16).counts != one.counts
    assert len(reads) == 2


def test_a_file_that_changed_is_read_anew(tmp_path: Path, reads: list[int]) -> None:
    file = tmp_path / "text.txt"
    file.write_text("to be or not to be\n" * 40)
    before = looked_at(file)
    file.write_text("to be or not to be\n" * 80)
    assert looked_at(file).counts.trained > before.counts.trained
    assert len(reads) == 2


def test_few_surveys_are_kept(tmp_path: Path, reads: list[int]) -> None:
    file = tmp_path / "text.txt"
    file.write_text("to be or not to be\n" * 4)
    for length in range(2, 2 + 2 * module._KEPT):
        looked_at(file, sequence_length=length)
    assert len(module._KNOWN) == module._KEPT
