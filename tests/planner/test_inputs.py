from __future__ import annotations

import json

import pytest

from modicum.core.errors import InputError
from modicum.models.config import ModelConfig
from modicum.planner import plan
from modicum.recipe import Recipe

SMALL = ModelConfig(vocabulary_size=300, width=16, layers=1, heads=2, context=64)


def refused(recipe: Recipe) -> InputError:
    with pytest.raises(InputError) as caught:
        plan(recipe)
    assert caught.value.exit_code == 2
    return caught.value


def test_missing_data(tmp_path):
    (tmp_path / "notes.jsonl").write_text('{"text": "a"}\n')
    error = refused(Recipe(data={"path": str(tmp_path / "note.jsonl")}))
    assert error.field == "data.path"
    assert error.suggestion == "notes.jsonl"


@pytest.mark.parametrize("content", [b"", b"\n \n", b'{"text": ""}\n'])
def test_empty_data(tmp_path, content):
    file = tmp_path / "empty.jsonl"
    file.write_bytes(content)
    error = refused(Recipe(data={"path": str(file)}))
    assert error.field == "data.path"
    assert "empty" in str(error)


def test_data_that_is_not_utf8(tmp_path):
    file = tmp_path / "latin.txt"
    file.write_bytes("one line\nZürich\n".encode("latin-1"))
    error = refused(Recipe(data={"path": str(file)}))
    assert (error.field, str(error.file), error.line) == ("data.path", str(file), 2)


def test_a_broken_line(tmp_path):
    file = tmp_path / "broken.jsonl"
    file.write_text('{"text": "a"}\n{"text": "b"}\n{"text": \n')
    error = refused(Recipe(data={"path": str(file)}))
    assert (error.field, str(error.file), error.line) == ("data.path", str(file), 3)


def test_a_missing_column(tmp_path):
    file = tmp_path / "other.jsonl"
    file.write_text('{"body": "a"}\n{"text": "b"}\n')
    error = refused(Recipe(data={"path": str(file)}))
    assert error.field in ("data.path", "data.column", "text", "column")
    assert (str(error.file), error.line) == (str(file), 1)
    assert "body" in str(error)


def test_validation_data_is_looked_at_too(text, tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{\n")
    error = refused(Recipe(data={"path": str(text), "validation_path": str(broken)}))
    assert (error.field, error.line) == ("data.validation_path", 1)


def test_a_folder_that_is_no_model(text, tmp_path):
    error = refused(Recipe(model={"path": str(tmp_path)}, data={"path": str(text)}))
    assert error.field == "model.path"
    assert "config.json" in str(error)


def test_a_folder_that_is_no_tokenizer(text, tmp_path):
    error = refused(Recipe(data={"path": str(text), "tokenizer": str(tmp_path)}))
    assert error.field == "data.tokenizer"


def test_a_model_without_a_tokenizer(text, hollow):
    folder = hollow(SMALL)
    (folder / "tokenizer.json").unlink()
    data = {"path": str(text), "sequence_length": 32}
    assert refused(Recipe(model={"path": str(folder)}, data=data)).field == "model.path"


def test_weights_that_config_does_not_describe(text, hollow):
    folder = hollow(SMALL)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 2}))
    data = {"path": str(text), "sequence_length": 32}
    error = refused(Recipe(model={"path": str(folder)}, data=data))
    assert error.field is not None
    assert "model.layers.1" in str(error)


def test_rows_longer_than_the_models_context(text, hollow):
    data = {"path": str(text), "sequence_length": 65}
    error = refused(Recipe(model={"path": str(hollow(SMALL))}, data=data))
    assert (error.field, error.value) == ("data.sequence_length", 65)
    assert "64" in str(error)


def test_an_adapter_target_that_is_no_layer(text, hollow):
    error = refused(
        Recipe(
            model={"path": str(hollow(SMALL))},
            data={"path": str(text), "sequence_length": 32},
            adapter={"method": "lora", "targets": ["q_prj"]},
        )
    )
    assert error.field == "adapter.targets"
    assert error.suggestion == "q_proj"


def test_a_models_shape_and_the_tokenizers_vocabulary_are_taken_from_their_files(
    text, hollow, tokenizer_folder
):
    data = {"path": str(text), "sequence_length": 32}
    old = plan(Recipe(model={"path": str(hollow(SMALL))}, data=data))
    assert old.inputs.config == SMALL
    assert old.prediction.total == SMALL.parameter_count()
    made = plan(Recipe(data={**data, "tokenizer": str(tokenizer_folder)}))
    assert made.inputs.config.vocabulary_size == made.inputs.tokenizer.vocabulary_size < 300
