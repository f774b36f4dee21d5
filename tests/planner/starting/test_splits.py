from __future__ import annotations

from pathlib import Path

import pytest

from modicum.core.errors import InputError
from modicum.planner.starting.data import chosen_data
from modicum.planner.starting.draft import Draft
from modicum.planner.starting.splits import split_of

ONE = "-00000-of-00001.parquet"


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
        ([f"train{ONE}", f"test{ONE}", f"validation{ONE}"], ".", f"train{ONE}", f"validation{ONE}"),
        (["README.md", f"data/train{ONE}", f"data/test{ONE}"], ".", f"data/train{ONE}", None),
        (["train.py", "test.py"], ".", "train.py", None),
        (["run.py", "test.py", "validation.py"], ".", ".", None),
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


def test_files_of_several_splits_are_not_trained_on_unasked(tmp_path: Path) -> None:
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        (tmp_path / f"{name}.parquet").touch()
    with pytest.raises(InputError, match=r"several splits \(train, test\).*data.include"):
        split_of(str(tmp_path))
    draft = Draft({"data.include": ["train-*"]})
    chosen_data(draft, str(tmp_path))
    assert draft.settings["data.path"].value == str(tmp_path)
