"""A recipe for classes of texts is made of what is found; nothing is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from classifiers import base_folder, rows, write_rows

from modicum.core.errors import InputError
from modicum.planner.starting import OpenQuestion, start
from modicum.planner.starting.recipe_text import recipe_text
from modicum.recipe_yaml import load

pytestmark = pytest.mark.usefixtures("traced_here")


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "d.jsonl", [row | {"file": "a.txt"} for row in rows(200)])


def test_an_encoder_gets_a_recipe_for_classes_that_reads_back(
    tmp_path: Path, labelled: Path
) -> None:
    made = start(str(base_folder(tmp_path / "bert", "bert")), str(labelled), memory="2GB")
    file = tmp_path / "made.yaml"
    file.write_text(recipe_text(made.draft.settings.values()))
    assert load(file) == made.recipe
    assert made.recipe.task == {
        "method": "text_classes", "text_columns": ["text"], "label_column": "label",
    }  # fmt: skip
    assert made.draft.settings["task.method"].why.startswith("the model is an encoder")
    assert made.draft.settings["task.label_column"].why.endswith("not read: file")
    data, training = made.recipe.data, made.recipe.training
    assert (data.sequence_length, data.validation_fraction) == (40, 0.05)
    assert (training.epochs, training.learning_rate, training.batch_size) == (3, 2e-4, 16)
    assert made.data["classes"] == {"animals": 100, "plants": 100}
    assert made.data["longest"] <= 12
    assert made.plan is not None
    assert made.plan.steps == -(-3 * 190 // 16)


def test_lora_takes_ten_times_the_rate(tmp_path: Path, labelled: Path) -> None:
    folder = str(base_folder(tmp_path / "bert", "bert"))
    made = start(folder, str(labelled), memory="2GB", method="lora")
    assert made.recipe.training.learning_rate == 2e-3
    assert made.recipe.adapter is not None
    with pytest.raises(InputError, match="LoRA goes with it"):
        start(folder, str(labelled), memory="2GB", method="mos")


def test_a_decoder_is_asked_for_and_a_token_that_fills_rows_is_asked(
    tmp_path: Path, labelled: Path
) -> None:
    folder = base_folder(tmp_path / "gpt2", "gpt2", None)
    asked: dict[str, Any] = {"task.method": "text_classes"}
    with pytest.raises(InputError, match=r"task\.pad_token"):
        start(str(folder), str(labelled), memory="2GB", asked=asked)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token": "[SEP]"}))
    made = start(str(folder), str(labelled), memory="2GB", asked=asked)
    assert [each.field for each in made.draft.questions] == ["task.pad_token"]
    assert made.recipe.task is not None
    assert made.recipe.task["pad_token"] == "[SEP]"


def test_columns_that_names_do_not_say_are_asked_for(tmp_path: Path) -> None:
    named = [
        {"id": str(n), "comment": f"{row['text']} here", "kind": row["label"], "by": f"u{n % 9}"}
        for n, row in enumerate(rows(60))
    ]
    file, folder = write_rows(tmp_path / "d.jsonl", named), base_folder(tmp_path / "bert", "bert")
    answered: list[str] = []

    def ask(question: OpenQuestion) -> Any:
        answered.append(question.field)
        return {"task.text_columns": "comment", "task.label_column": "kind"}[question.field]

    made = start(str(folder), str(file), memory="2GB", ask=ask)
    assert answered == ["task.text_columns", "task.label_column"]
    assert made.recipe.task is not None
    assert made.recipe.task["text_columns"] == ["comment"]
    silent = start(str(folder), str(file), memory="2GB")
    assert silent.recipe == made.recipe
    reasons = {question.field: question.choices for question in silent.draft.questions}
    assert reasons["task.label_column"] == ("id", "kind", "by")
    asked = {"task.label_column": "by", "task.text_columns": ["comment"]}
    given = start(str(folder), str(file), memory="2GB", asked=asked)
    assert given.draft.questions == []
    assert len(given.data["classes"]) == 9


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "a b", "score": 0.5}, "no column holds classes"),
        ({"a": 1, "label": 2}, "no column holds texts"),
        ({"text": "a b", "label": "same"}, "same label"),
    ],
)
def test_rows_without_texts_or_classes_are_refused(
    tmp_path: Path, row: dict[str, Any], said: str
) -> None:
    file, folder = write_rows(tmp_path / "d.jsonl", [row] * 30), base_folder(tmp_path / "b", "bert")
    with pytest.raises(InputError, match=said):
        start(str(folder), str(file), memory="2GB")


def test_pairs_are_read_together(tmp_path: Path) -> None:
    pairs = [
        {"premise": row["text"], "hypothesis": "old oak", "label": row["label"]} for row in rows(40)
    ]
    file, folder = write_rows(tmp_path / "d.jsonl", pairs), base_folder(tmp_path / "b", "bert")
    made = start(str(folder), str(file), memory="2GB")
    assert made.data["text_columns"] == ["premise", "hypothesis"]
    assert made.data["longest"] >= 2 + 3 + 3


def test_text_files_have_no_labels(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be")
    with pytest.raises(InputError, match="text files have no labels"):
        start(str(base_folder(tmp_path / "b", "bert")), str(tmp_path / "a.txt"), memory="2GB")
    with pytest.raises(InputError, match="rows with a text and a label"):
        start(str(tmp_path / "b"), None, memory="2GB")


def test_what_is_asked_for_of_the_validation_is_what_the_recipe_says(
    tmp_path: Path, labelled: Path
) -> None:
    folder = str(base_folder(tmp_path / "b", "bert"))
    own = write_rows(tmp_path / "held.jsonl", rows(20))
    made = start(folder, str(labelled), memory="2GB", asked={"data.validation_path": str(own)})
    assert made.recipe.data.validation_path == str(own)
    assert "data.validation_fraction" not in made.draft.settings
    asked: dict[str, Any] = {"data.validation_fraction": 0.2, "training.epochs": 3}
    made = start(folder, str(labelled), memory="2GB", asked=asked)
    assert made.data["rows"] == 200
    assert made.plan is not None
    assert made.plan.steps == -(-3 * 160 // 16)
    assert f"about {made.plan.steps} updates" in made.draft.settings["training.warmup_steps"].why


def test_a_column_of_names_is_no_classes_and_one_with_a_hole_is_not_passed_over(
    tmp_path: Path,
) -> None:
    folder = str(base_folder(tmp_path / "b", "bert"))
    named = write_rows(
        tmp_path / "d.jsonl", [r | {"label": f"u{n}"} for n, r in enumerate(rows(60))]
    )
    with pytest.raises(InputError, match="seem to be no classes"):
        start(folder, str(named), memory="2GB")
    asked = {"task.label_column": "label"}
    assert len(start(folder, str(named), memory="2GB", asked=asked).data["classes"]) == 60
    holes = [r | {"lang": "en"} for r in rows(60)]
    holes[7]["label"] = None
    with pytest.raises(InputError, match=r"d\.jsonl:8.*label"):
        start(folder, str(write_rows(tmp_path / "d.jsonl", holes)), memory="2GB")
    users = [{"user": "one", "comment": r["text"], "label": r["label"]} for r in rows(60)]
    made = start(folder, str(write_rows(tmp_path / "d.jsonl", users)), memory="2GB")
    assert made.data["text_columns"] == ["comment"]
    assert [each.field for each in made.draft.questions] == ["task.text_columns"]


def test_an_answer_that_is_typed_is_checked_with_its_task() -> None:
    question = OpenQuestion("task.pad_token", "Which token fills rows?", "[SEP]")
    assert question.check("[PAD]") == "[PAD]"
