from __future__ import annotations

from pathlib import Path

import pytest

from modicum.planner.starting.splits import split_of


@pytest.mark.parametrize(
    ("there", "given", "train", "validation"),
    [
        (["rows.jsonl"], "rows.jsonl", "rows.jsonl", None),
        (["train.jsonl", "val.jsonl"], "train.jsonl", "train.jsonl", "val.jsonl"),
        (["train.jsonl", "val.csv"], "train.jsonl", "train.jsonl", None),
        (["my-train.csv", "my-dev.csv"], "my-train.csv", "my-train.csv", "my-dev.csv"),
        (["qa.json", "qa_validation.json"], "qa.json", "qa.json", "qa_validation.json"),
        (["train.jsonl.gz", "valid.jsonl"], "train.jsonl.gz", "train.jsonl.gz", "valid.jsonl"),
        (["train.jsonl", "validation.jsonl"], ".", "train.jsonl", "validation.jsonl"),
        (["train/a.txt", "validation/b.txt"], ".", "train", "validation"),
        (["train/a.txt"], ".", "train", None),
        (["a.txt", "validation.txt"], ".", ".", None),
        ([], "nothing.txt", "nothing.txt", None),
    ],
)
def test_the_validation_data_is_found_by_its_name(
    tmp_path: Path, there: list[str], given: str, train: str, validation: str | None
) -> None:
    for name in there:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    found = split_of(str(tmp_path / given))
    expected = None if validation is None else str(tmp_path / validation)
    assert found == (str(tmp_path / train), expected)
