"""Images and labels as folders and tables name them; no image is opened here."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from modicum.core.errors import InputError
from modicum.data.image_files import LabelledFile, find_images
from modicum.data.parts import Draw


def touch(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    return root


def labels(files: tuple[LabelledFile, ...]) -> list[tuple[str, str]]:
    return [(file.name, file.label) for file in files]


def test_folders_are_classes_and_hidden_files_are_none(tmp_path: Path) -> None:
    touch(tmp_path, "dogs/2.jpeg", "dogs/1.JPG", "cats/deep/a.png", "cats/.b.png", "cats/notes.txt",
          ".cache/x.png", "readme.md")  # fmt: skip
    found = find_images(tmp_path)
    assert found.names == ("cats", "dogs")
    assert labels(found.train) == [
        ("cats/deep/a.png", "cats"), ("dogs/1.JPG", "dogs"), ("dogs/2.jpeg", "dogs"),
    ]  # fmt: skip
    assert found.validation == ()
    assert found.counts() == {
        "train": {"cats": 1, "dogs": 2}, "validation": {"cats": 0, "dogs": 0},
    }  # fmt: skip


def test_numbers_are_in_the_order_of_their_values(tmp_path: Path) -> None:
    assert find_images(touch(tmp_path, "10/a.png", "2/a.png")).names == ("2", "10")


def test_validation_is_a_folder_or_a_path(tmp_path: Path) -> None:
    touch(tmp_path, "train/a/1.png", "train/b/1.png", "validation/a/2.png", "other/b/3.png")
    (tmp_path / "other").rename(tmp_path / ".other")
    found = find_images(tmp_path, draw=Draw(0.5))
    assert labels(found.validation) == [("a/2.png", "a")]
    assert len(found.train) == 2
    found = find_images(tmp_path, {"validation": tmp_path / ".other"})
    assert labels(found.validation) == [("b/3.png", "b")]
    touch(tmp_path, "validation/c/4.png")
    with pytest.raises(InputError, match=r"validation has no image to train on.*allowed: a, b"):
        find_images(tmp_path)
    touch(tmp_path, "more/a/4.png")
    with pytest.raises(InputError, match="stands next to train and validation"):
        find_images(tmp_path)


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_table_names_files_as_seen_from_it(tmp_path: Path, suffix: str) -> None:
    touch(tmp_path, "images/1.png", "images/2.png")
    rows = [{"file": "images/1.png", "label": 1}, {"file": "images/2.png", "label": 0}]
    table = tmp_path / f"table.{suffix}"
    if suffix == "csv":
        table.write_text("label,file\n1,images/1.png\n0,images/2.png\n")
    else:
        table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = find_images(table)
    assert labels(found.train) == [("images/1.png", "1"), ("images/2.png", "0")]
    assert found.names == ("0", "1")
    assert found.train[0].path == tmp_path / "images/1.png"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("file,label\nimages/9.png,a\n", r"table.csv:2: file: there is no such image"),
        ("file,label\ntable.csv,a\n", r"table.csv:2: file: is no image"),
        ("file,label\nimages/1.png,\n", r"table.csv:2: label: the row has no such column, or"),
        ("name,label\nimages/1.png,a\n", r"file: the row has no such column.*'name', 'label'"),
        ("file,label\n", r"the table has no rows"),
        ("file,label\nimages/1.png,a\n", r"all images are of one class"),
    ],
)
def test_what_is_wrong_with_a_table_is_named(tmp_path: Path, text: str, said: str) -> None:
    touch(tmp_path, "images/1.png")
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(InputError, match=said):
        find_images(tmp_path / "table.csv")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("1.png", "cats/2.png"), r"1.png: this image has no class"),
        (("cats/1.png", "dogs/notes.txt"), r"dogs: this class has no image"),
        (("readme.md",), r"holds no folders of classes"),
        (("cats/1.png",), r"all images are of one class.*found: 'cats'"),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(
    tmp_path: Path, names: tuple[str, ...], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        find_images(touch(tmp_path / "data", *names))
    with pytest.raises(InputError, match="no such folder or table"):
        find_images(tmp_path / "nowhere")
    with pytest.raises(InputError, match="neither a folder nor a table"):
        find_images(touch(tmp_path, "a.png") / "a.png")


def test_a_test_is_a_folder_a_path_or_a_part_of_each_class(tmp_path: Path) -> None:
    touch(tmp_path, "train/a/1.png", "train/b/1.png", "validation/a/2.png", "test/b/2.png")
    found = find_images(tmp_path)
    assert labels(found.test) == [("b/2.png", "b")]
    assert list(found.counts()) == ["train", "validation", "test"]
    found = find_images(tmp_path, {"test": tmp_path / "validation"})
    assert labels(found.test) == labels(found.validation) == [("a/2.png", "a")]
    names = [f"{label}/{n}.png" for label in "ab" for n in range(10)]
    flat = touch(tmp_path / "flat", *names)
    one, other = (find_images(flat, draw=Draw(0.25, 0.2, seed)) for seed in (0, 1))
    assert [len(part) for part in one.parts.values()] == [12, 4, 4]
    assert one.test == other.test
    assert one.validation != other.validation
    assert list(find_images(flat).counts()) == ["train", "validation"]


def test_train_and_one_other_part_are_no_classes(tmp_path: Path) -> None:
    names = [f"train/{label}/{n}.png" for label in "ab" for n in range(10)]
    found = find_images(touch(tmp_path / "one", *names, "test/a/x.png"), draw=Draw(0.2, 0.5))
    assert found.names == ("a", "b")
    assert [len(part) for part in found.parts.values()] == [16, 4, 1]
    for name in ("val", "valid", "dev"):
        found = find_images(touch(tmp_path / name, *names, f"{name}/b/x.png"), draw=Draw(0.2))
        assert labels(found.validation) == [("b/x.png", "b")]
        assert len(found.train) == 20
    with pytest.raises(InputError, match="/dev: a folder stands next to train and val, so"):
        find_images(touch(tmp_path / "val", "dev/b/x.png"))


@pytest.mark.parametrize(
    ("names", "part"),
    [
        (("training/a/1.png", "validation/b/1.png"), "training"),
        (("Test/a/1.png", "Train/a/1.png"), "Test"),
        (("train/a/1.png", "train/b/1.png"), "train"),
    ],
)
def test_a_part_under_another_name_is_no_class(
    tmp_path: Path, names: tuple[str, ...], part: str
) -> None:
    said = rf"/{part}: has the name of a part of the data.*the parts train, validation and test"
    with pytest.raises(InputError, match=said):
        find_images(touch(tmp_path, *names))


def test_classes_may_be_called_as_parts_where_images_are_in_them(tmp_path: Path) -> None:
    assert find_images(touch(tmp_path, "dev/1.png", "test/1.png")).names == ("dev", "test")


@pytest.mark.skipif(sys.platform == "darwin", reason="its disks take names in UTF-8 alone")
def test_names_of_files_may_be_any_bytes_and_those_of_classes_text(tmp_path: Path) -> None:
    odd = os.fsdecode(b"caf\xe9")
    names = [f"{label}/{name}.png" for label in "ab" for name in (odd, "1")]
    found = find_images(touch(tmp_path / "files", *names), draw=Draw(0.5))
    assert [len(part) for part in found.parts.values()] == [2, 2]
    with pytest.raises(InputError, match=r"the name of this class is not UTF-8.*caf.udce9"):
        find_images(touch(tmp_path / "classes", "a/1.png", f"{odd}/1.png"))


def test_a_link_to_a_folder_that_is_there_already_is_refused(tmp_path: Path) -> None:
    root = touch(tmp_path / "data", "a/1.png", "b/1.png")
    touch(tmp_path, "other/2.png")
    (root / "a" / "more").symlink_to(tmp_path / "other")
    assert len(find_images(root).train) == 3
    (root / "a" / "again").symlink_to(".")
    with pytest.raises(InputError, match="a/again: by a link this is a folder whose images"):
        find_images(root)
