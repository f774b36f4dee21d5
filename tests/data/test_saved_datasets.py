from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modicum.core.errors import InputError
from modicum.data import open_source
from modicum.data.saved_datasets import saved_files


def save(folder: Path, names: list[str], state: dict[str, Any] | None = None) -> Path:
    """A folder as `Dataset.save_to_disk` writes it, of a row a file."""
    folder.mkdir()
    pyarrow = pytest.importorskip("pyarrow")
    for number, name in enumerate(names):
        table = pyarrow.table({"text": [f"row {number}"]})
        with pyarrow.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(table)
    files = [{"filename": name} for name in names]
    content = {"_data_files": files, "_fingerprint": "0", "_split": "train"} | (state or {})
    (folder / "state.json").write_text(json.dumps(content))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_saved_data_set_is_its_files_in_its_order(tmp_path):
    names = ["data-b.arrow", "data-a.arrow"]
    folder = save(tmp_path / "saved", names)
    (folder / "cache-0.arrow").write_bytes(b"what was computed of it")
    (folder / "notes.jsonl").write_text('{"text": "no row of it"}\n')
    found = [(d.text, d.origin) for d in open_source(folder).documents()]
    assert found == [("row 0", "data-b.arrow:1"), ("row 1", "data-a.arrow:1")]


def test_several_splits_are_never_mixed(tmp_path):
    folder = tmp_path / "both"
    folder.mkdir()
    save(folder / "train", ["data.arrow"])
    save(folder / "test", ["data.arrow"])
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(InputError, match=r"several splits; .*both/train, .*both/test"):
        open_source(folder)
    assert len(list(open_source(folder / "train").documents())) == 1


def test_other_folders_are_none(tmp_path):
    assert saved_files(tmp_path) is None
    (tmp_path / "state.json").write_text("{}")
    assert saved_files(tmp_path) is None


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ('{"_data_files": [{"filename": "gone.arrow"}]}', r"gone\.arrow: .* it is missing"),
        (
            '{"_data_files": [{"filename": "../other.arrow"}]}',
            "_data_files: holds no list of names",
        ),
        ('{"_data_files": [7]}', "_data_files: holds no list of names"),
        ("{}", "_data_files: holds no list of names"),
        ('{"_indices_data_files": [{"filename": "i.arrow"}]}', "flatten_indices"),
        ("{", r"state\.json:1: "),
        ("[]", r"state\.json: holds no object"),
    ],
)
def test_what_was_not_saved_so_is_refused(tmp_path, state, message):
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(InputError, match=message):
        saved_files(tmp_path)
