from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from classifiers import ENCODERS, add_tokenizer, base_folder, rows, theirs, write_rows

from modicum.core.contracts.catalog import find
from modicum.core.errors import InputError
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.ranks.ranks import Ranks
from modicum.data.sources import open_source
from modicum.recipe import Recipe
from modicum.serve import load_run
from modicum.tasks import task_of
from modicum.tasks.text_class_data import labelled_texts
from modicum.tasks.text_classes import TextClasses


def recipe(base: Path, **sections: Any) -> Recipe:
    made: dict[str, Any] = {
        "task": {"method": "text_classes"},
        "model": {"path": str(base)},
        "data": {
            "path": str(write_rows(base.parent / "d.jsonl", rows(20))),
            "sequence_length": 12,
            "validation_fraction": 0.2,
        },
    }
    for name, section in sections.items():
        made[name] = made.get(name, {}) | section
    return Recipe(**made)


def test_the_catalog_knows_it_as_a_task() -> None:
    assert find("text_classes", room="tasks").load() is TextClasses


def head_folder(folder: Path, names: list[str]) -> Path:
    """A tiny BERT that was trained for classes of these names."""
    config = transformers.AutoConfig.for_model("bert", **ENCODERS["bert"])
    config.id2label = dict(enumerate(names))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = transformers.AutoModelForSequenceClassification.from_config(config)
    made.save_pretrained(folder)
    return add_tokenizer(folder)


def test_a_head_is_kept_where_its_classes_are_the_same(tmp_path: Path) -> None:
    same = head_folder(tmp_path / "same", ["animals", "plants"])
    other = head_folder(tmp_path / "other", ["plants", "animals", "stones"])
    asked = recipe(same)
    task = task_of(asked)
    inputs = task.look(asked)
    assert inputs.new == ()
    with on_meta():
        model = task.model(inputs.config)
    materialise(model, "cpu")
    task.fill(model, inputs)
    ids = torch.tensor([[2, 5, 6, 3]])
    torch.testing.assert_close(model.eval()(ids), theirs(same)(ids).logits, rtol=0, atol=1e-6)
    asked = recipe(other)
    inputs = task_of(asked).look(asked)
    assert inputs.new == ("classifier.weight", "classifier.bias")
    assert inputs.described.endswith("new: classifier, as the folder's is for other classes")


@pytest.mark.parametrize(
    ("sections", "field", "words"),
    [
        ({"adapter": {"method": "mos"}}, "adapter.method", "LoRA goes with it"),
        ({"data": {"sequence_length": 99}}, "data.sequence_length", r"context \(40\)"),
        ({"data": {"too_long": "split"}}, "data.too_long", "one label"),
        ({"data": {"column": "body"}}, "data.column", "means nothing"),
        (
            {"task": {"label_column": "kind"}},
            "kind",
            "no such column; task.label_column names this column; allowed: text, label",
        ),
        (
            {"task": {"text_columns": ["body"]}},
            "body",
            "no such column; task.text_columns names this column; allowed: text, label",
        ),
        ({"task": {"pad_token": "[NO]"}}, "task.pad_token", "no such token"),
        ({"task": {"classes": ["animals", "stones"]}}, "task.label_column", "none of the classes"),
        ({"task": {"classes": ["animals"]}}, "task.classes", "two or more different names"),
    ],
)
def test_what_is_not_right_is_refused(
    sections: dict[str, Any], field: str, words: str, tmp_path: Path
) -> None:
    base = base_folder(tmp_path / "base", "bert")
    asked = recipe(base, **sections)
    with pytest.raises(InputError, match=words) as error:
        task_of(asked).look(asked)
    assert field in str(error.value)


def test_padding_must_be_known_and_is_what_is_asked_for(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", "gpt2", pad=None)
    asked = recipe(base)
    with pytest.raises(InputError, match="no pad_token") as error:
        task_of(asked).look(asked)
    assert error.value.field == "task.pad_token"
    asked = recipe(base, task={"pad_token": "[SEP]"})
    assert task_of(asked).look(asked).config.raw["pad_token_id"] == 3


@pytest.mark.parametrize(
    ("kind", "words"),
    [("t5", "encoder–decoder"), ("bart", "encoder–decoder"), ("vit", "reads images")],
)
def test_what_comes_later_is_refused_by_name(kind: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps({"model_type": kind}))
    asked = recipe(tmp_path / "base")
    with pytest.raises(InputError, match=words) as error:
        task_of(asked).look(asked)
    assert error.value.value == kind


def test_pairs_need_a_tokenizer_that_separates_them(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", "bert")
    file = base / "tokenizer.json"
    inner = tokenizers.Tokenizer.from_file(str(file))
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A", pair="[CLS] $A $B:1", special_tokens=[("[CLS]", 2)]
    )
    begun = json.loads(inner.to_str())
    for made in (begun, begun | {"post_processor": None}):
        file.write_text(json.dumps(made))
        asked = recipe(base, task={"text_columns": ["text", "text"]})
        with pytest.raises(InputError, match="puts nothing between the two texts") as error:
            task_of(asked).look(asked)
        assert error.value.field == "task.text_columns"


def test_compiled_blocks_are_refused(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", "bert")
    with pytest.raises(InputError, match="another length in every batch"):
        recipe(base, training={"compile": "blocks"})


def test_a_classifier_is_not_talked_to(tmp_path: Path) -> None:
    folder = head_folder(tmp_path / "model", ["a", "b"])
    assert json.loads((folder / "config.json").read_text())["architectures"]
    with pytest.raises(InputError, match="writes text"):
        load_run(folder)


def test_without_a_test_the_rows_are_what_they_were_before_there_were_any(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", "bert")
    asked = recipe(base)
    texts = labelled_texts(asked, TextClasses(**asked.fields("task")))
    held = [place for place, flag in enumerate(texts.flags) if flag]
    how = [
        [open_source(asked.data.path).fingerprint()],
        TextClasses().model_dump(mode="json"), 12, "truncate", held,
    ]  # fmt: skip
    expected = hashlib.sha256(json.dumps(how, sort_keys=True).encode()).hexdigest()
    assert texts.digest == expected
    tested = recipe(base, data={"test_fraction": 0.25})
    assert labelled_texts(tested, TextClasses()).digest != expected


def test_a_test_of_texts_is_a_part_of_each_class_or_data_of_its_own(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", "bert")

    def prepared(name: str, **data: Any) -> tuple[str, list[list[int]]]:
        asked = recipe(base, data=data)
        task = task_of(asked)
        inputs = task.look(asked)
        made = task.prepare(asked, inputs, tmp_path / name, lambda *_: None, Ranks())
        parts = (made.train, made.validation, made.test)
        labels = [[] if part is None else part.labels.tolist() for part in parts]
        return inputs.described, labels

    words, labels = prepared("drawn", test_fraction=0.25)
    assert [sorted(part) for part in labels] == [[0] * n + [1] * n for n in (6, 2, 2)]
    assert ", 4 of them for validation, 4 for test" in words
    other = write_rows(tmp_path / "t.jsonl", rows(6))
    words, labels = prepared("own", test_path=str(other), validation_fraction=0.0)
    assert [len(part) for part in labels] == [20, 0, 6]
    assert "; test: " in words


def test_the_tokenizer_is_kept_before_the_rows_and_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, run = recipe(base_folder(tmp_path / "base", "bert")), tmp_path / "run"
    task = task_of(asked)
    inputs = task.look(asked)

    def prepared() -> list[str]:
        made = task.prepare(asked, inputs, run, lambda *_: None, Ranks())
        return [file.name for file in made.files]

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("modicum.tasks.text_class_data.write_rows", killed)
        with pytest.raises(KeyboardInterrupt):
            prepared()
    assert [path.name for path in run.iterdir()] == ["tokenizer"]
    names = prepared()
    assert "tokenizer.json" in names
    (run / "tokenizer" / "tokenizer.json").unlink()
    assert prepared() == names


def test_data_that_is_made_anew_leaves_files_that_are_linked_to_the_old(tmp_path: Path) -> None:
    asked = recipe(base_folder(tmp_path / "base", "bert"))
    task = task_of(asked)
    inputs = task.look(asked)
    task.prepare(asked, inputs, tmp_path / "run", lambda *_: None, Ranks())
    file, linked = tmp_path / "run" / "tokenizer" / "tokenizer.json", tmp_path / "linked.json"
    file.write_text("{}")
    linked.hardlink_to(file)
    shutil.rmtree(tmp_path / "run" / "data")
    task.prepare(asked, inputs, tmp_path / "run", lambda *_: None, Ranks())
    assert file.read_text() != linked.read_text() == "{}"


@pytest.mark.parametrize(("own", "field"), [(True, "model.path"), (False, "data.tokenizer")])
def test_a_token_beyond_the_model_s_vocabulary_names_its_row(
    own: bool, field: str, tmp_path: Path
) -> None:
    base = base_folder(tmp_path / "base", "bert")
    other = base if own else tmp_path / "other"
    other.mkdir(exist_ok=True)
    file = add_tokenizer(other) / "tokenizer.json"
    raw = json.loads(file.read_text())
    raw["model"]["vocab"] |= {"yak": 63, "zebu": 64}
    file.write_text(json.dumps(raw))
    asked = recipe(base, data={} if own else {"tokenizer": str(other)})
    made = [*rows(5), {"text": "the yak", "label": "animals"}]
    data = write_rows(tmp_path / "d.jsonl", [*made, {"text": "the old zebu", "label": "animals"}])
    task = task_of(asked)
    inputs = task.look(asked)
    with pytest.raises(InputError, match=rf"token 64 \('zebu'\) in .*{data.name}:7") as caught:
        task.prepare(asked, inputs, tmp_path / "run", lambda *_: None, Ranks())
    assert (caught.value.field, caught.value.value) == (field, 64)


def test_the_first_rows_that_are_evaluated_are_of_all_classes(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", "bert")
    made = sorted(rows(100), key=lambda row: row["label"])
    file = write_rows(tmp_path / "sorted.jsonl", made)
    asked = recipe(base, data={"path": str(file), "validation_fraction": 0.5})
    task = task_of(asked)
    data = task.prepare(asked, task.look(asked), tmp_path / "run", lambda *_: None, Ranks())
    assert data.train.labels.tolist() == [0] * 25 + [1] * 25
    assert data.validation is not None
    assert data.validation.labels.bincount().tolist() == [25, 25]
    assert set(data.validation.labels[:10].tolist()) == {0, 1}


def test_words_that_are_integers_are_classes_in_the_order_of_their_values(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", "bert")
    lines = [f"{row['text']},{n % 11}\n" for n, row in enumerate(rows(44))]
    (tmp_path / "rows.csv").write_text("".join(["text,label\n", *lines]))
    asked = recipe(base, data={"path": str(tmp_path / "rows.csv")})
    texts = labelled_texts(asked, TextClasses())
    assert texts.names == tuple(str(n) for n in range(11))
    assert texts.labels == tuple(n % 11 for n in range(44))
    # What was prepared with classes in the order of words is not taken for this.
    how = [
        [open_source(asked.data.path).fingerprint()],
        TextClasses().model_dump(mode="json"), 12, "truncate",
        [place for place, flag in enumerate(texts.flags) if flag],
    ]  # fmt: skip
    assert texts.digest != hashlib.sha256(json.dumps(how, sort_keys=True).encode()).hexdigest()


@pytest.mark.parametrize("inside", [True, False])
def test_rows_to_evaluate_on_that_would_be_trained_on_are_refused(
    inside: bool, tmp_path: Path
) -> None:
    base = base_folder(tmp_path / "base", "bert")
    (tmp_path / "rows").mkdir()
    for name in ("a", "b"):
        write_rows(tmp_path / "rows" / f"{name}.jsonl", rows(20))
    held = tmp_path / "rows" / "b.jsonl" if inside else tmp_path / "rows"
    data = {"path": str(tmp_path / "rows"), "validation_path": str(held)}
    with pytest.raises(InputError) as caught:
        labelled_texts(recipe(base, data=data), TextClasses())
    words = "'b.jsonl' is among the files of data.path, so it would be trained on; name it in"
    assert (words if inside else "holds all that data.path names, so") in str(caught.value)
    assert caught.value.field == "data.validation_path"
    if inside:
        texts = labelled_texts(recipe(base, data=data | {"exclude": ["b.jsonl"]}), TextClasses())
        assert texts.counts()["rows"] == 20
