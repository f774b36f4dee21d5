from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from classifiers import write_rows

from modicum.core.errors import InputError
from modicum.data import labelled_texts
from modicum.data.labelled_texts import (
    LabelledText,
    class_names,
    numbered,
    read_labelled,
)
from modicum.data.parts import Draw
from modicum.data.sources import open_source
from modicum.data.text_classes import EncodedRow, Padding, read_side
from modicum.data.text_classes import write_rows as write_tokens


def row(label: int | str) -> LabelledText:
    return LabelledText(("a",), label, "d.jsonl:1")


def test_classes_are_those_of_the_rows_or_those_listed() -> None:
    rows = [row(label) for label in ("no", "yes", "no")]
    assert class_names(rows) == ("no", "yes")
    assert class_names(rows, ["yes", "no"]) == ("yes", "no")
    assert numbered(row("yes"), ("no", "yes")) == 1
    assert numbered(row(1), ("no", "yes"), listed=True) == 1
    with pytest.raises(InputError, match="none of the classes"):
        numbered(row(1), ("no", "yes"))
    with pytest.raises(InputError, match="same label"):
        class_names(rows[:1])


def test_a_number_and_its_name_are_one_class() -> None:
    rows = [row(label) for label in (0, "1", "0", 1)]
    assert class_names(rows) == ("0", "1")
    assert [numbered(each, ("0", "1")) for each in rows] == [0, 1, 0, 1]
    with pytest.raises(InputError, match="same label"):
        class_names(rows[::2])


def test_words_that_are_integers_are_sorted_by_value_and_places() -> None:
    rows = [row(label) for label in ("10", "2", "01", "1", 3)]
    assert class_names(rows) == ("01", "1", "2", "3", "10")
    assert class_names([*rows, row("b")]) == ("01", "1", "10", "2", "3", "b")
    assert numbered(row("1"), ("no", "yes"), listed=True) == 1
    assert numbered(row("2"), ("1", "2"), listed=True) == 1
    for label, names in (("01", ("no", "yes")), ("2", ("no", "yes")), ("0", ("1", "2"))):
        with pytest.raises(InputError, match="none of the classes"):
            numbered(row(label), names, listed=True)
    with pytest.raises(InputError, match="none of the classes"):
        numbered(row("1"), ("no", "yes"))


def test_an_integer_is_no_place_where_a_name_spells_another_place() -> None:
    names = ("1", "2", "3")
    assert [numbered(row(label), names, listed=True) for label in (1, 2, 3)] == [0, 1, 2]
    with pytest.raises(InputError, match="none of the classes"):
        numbered(row(0), names, listed=True)
    assert numbered(row(0), ("4", "5"), listed=True) == 0
    assert numbered(row(0), ("no star", "1"), listed=True) == 0


def test_names_are_looked_at_once_for_the_places_of_all_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names, looked_at = [f"class {n}" for n in range(50)], Counter[str]()
    integer = labelled_texts._integer

    def counted(label: int | str) -> int | None:
        looked_at[str(label)] += 1
        return integer(label)

    monkeypatch.setattr(labelled_texts, "_integer", counted)
    labels = [*range(50)] * 2
    assert [numbered(row(label), names, listed=True) for label in labels] == labels
    assert [looked_at[name] for name in names] == [1] * 50


@pytest.mark.parametrize("column", ["text", "label"])
def test_half_a_surrogate_pair_is_named(column: str, tmp_path: Path) -> None:
    made = {"text": "a", "label": "b"}
    rows = [made, made | {column: "x\ud83d"}]
    source = open_source(write_rows(tmp_path / "d.jsonl", rows))
    with pytest.raises(InputError, match=rf":2: {column}: character 1 is half a surrogate pair"):
        list(read_labelled(source, ["text"], "label"))


@pytest.mark.parametrize("asked", [["no"], ["no", "no"], ["no", "yes", "no"]])
def test_classes_that_are_listed_are_two_different_names_at_least(asked: list[str]) -> None:
    with pytest.raises(InputError, match="two or more different names") as caught:
        class_names([row("no"), row("yes")], asked)
    assert (caught.value.field, caught.value.value) == ("task.classes", ", ".join(asked))


def test_the_same_part_of_each_class_is_held_out() -> None:
    labels = [0] * 40 + [1] * 10 + [2]
    groups = [str(place) for place in range(len(labels))]
    held = Draw(0.2, seed=3).flags_by_class(labels, groups)
    assert [n for n, flag in zip(labels, held, strict=True) if flag] == [0] * 8 + [1] * 2
    assert held == Draw(0.2, seed=3).flags_by_class(labels, groups)
    assert held != Draw(0.2, seed=4).flags_by_class(labels, groups)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"text": "a"}, "no such column"),
        ({"text": "a", "label": None}, "a name or an integer, and is null"),
        ({"text": 1, "label": "b"}, "must be text, and is a number"),
    ],
)
def test_a_row_without_text_or_label_is_named(
    made: dict[str, object], words: str, tmp_path: Path
) -> None:
    source = open_source(write_rows(tmp_path / "d.jsonl", [{"text": "a", "label": "b"}, made]))
    with pytest.raises(InputError, match=words) as error:
        list(read_labelled(source, ["text"], "label"))
    assert error.value.line == 2


def test_rows_are_padded_to_the_longest_of_a_batch(tmp_path: Path) -> None:
    rows = [EncodedRow([5, 6, 7], [0, 0, 1], 1), EncodedRow([8], [0], 0), EncodedRow([9], [0], 1)]
    write_tokens(tmp_path / "data", {"train": rows[:2], "validation": rows[2:]}, {})
    padding = Padding(3, masks=True, types=True)
    train = read_side(tmp_path / "data", "train", padding)
    assert train is not None
    batch = train.batch([1, 0])
    assert batch.input_ids.tolist() == [[8, 3, 3], [5, 6, 7]]
    assert batch.mask is not None
    assert batch.mask.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert batch.types is not None
    assert batch.types.tolist() == [[0, 0, 0], [0, 0, 1]]
    assert batch.labels.tolist() == [0, 1]
    assert train.worst(2).input_ids.tolist() == [[5, 6, 7]] * 2
    assert [part.rows for part in batch.split(1)] == [1, 1]
    assert batch.idle().count == 0
    held = read_side(tmp_path / "data", "validation", padding)
    assert held is not None
    assert torch.equal(held.batch([0]).input_ids, torch.tensor([[9]]))
    assert read_side(tmp_path / "data", "test", padding) is None
