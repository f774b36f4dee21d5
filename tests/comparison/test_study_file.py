"""The record of a study: what of it is no part of what is compared, and older ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from formula_trials import Bowl, sides

from modicum.comparison import Side, Study
from modicum.core.errors import InputError

AB = sides("a", "b")


def resumed(folder: Path, three: list[Side]) -> tuple[int, dict[str, Any]]:
    """How many trials a study of one seed has run, and its record."""
    bowl = Bowl()
    Study(folder, three, bowl, trials=1, seeds=1, sampler="grid", journal=False).run()
    return len(bowl.calls), json.loads((folder / "study.json").read_text())


def test_why_a_side_takes_no_part_may_be_another_reason_by_now(tmp_path: Path) -> None:
    def without_room(words: str) -> tuple[int, dict[str, Any]]:
        return resumed(tmp_path, [*AB, Side("c", refusal=words)])

    calls, there = without_room("needs 412 MB")
    assert calls == 4
    assert there["identity"]["sides"]["c"] == {"space": {}, "fixed": {}, "refused": True}
    assert there["refused"] == {"c": "needs 412 MB"}
    assert without_room("needs 413 MB") == (0, there)
    # An older file has the words among the sides.
    older = json.loads((tmp_path / "study.json").read_text())
    del older["identity"]["sides"]["c"]["refused"]
    older["identity"]["sides"]["c"]["refusal"] = older.pop("refused")["c"]
    (tmp_path / "study.json").write_text(json.dumps(older))
    assert without_room("needs 414 MB") == (0, there)
    with pytest.raises(InputError, match=r"holds another comparison.*sides\.c"):
        resumed(tmp_path, [*AB, *sides("c")])
