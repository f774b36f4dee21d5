from __future__ import annotations

import json
from pathlib import Path

import pytest

from modicum.core.errors import InputError
from modicum.models.config import ModelConfig
from modicum.models.huggingface import CONFIG, read_config
from modicum.models.plan_headers import check_weights, has_weights, header_for_plan

SMALL = ModelConfig(vocabulary_size=300, width=16, layers=1, heads=2, context=64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder of config.json alone."""
    (tmp_path / CONFIG).write_text(json.dumps(SMALL.to_hf()))
    return tmp_path


def test_a_config_alone_is_enough_for_a_header_and_not_for_training(folder: Path) -> None:
    header = header_for_plan(folder)
    assert (header.config, header.tensors) == (SMALL, {})
    with pytest.raises(InputError, match="enough for a plan and not for training") as caught:
        check_weights(folder)
    assert (caught.value.field, caught.value.file) == ("model.path", folder)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pytorch_model.bin", "pickled"),
        ("model.safetensors", "not a safetensors file"),
        ("model-00001-of-00002.safetensors", "has no model.safetensors"),
    ],
)
def test_weights_that_are_there_are_checked(folder: Path, name: str, said: str) -> None:
    (folder / name).write_bytes(b"x")
    assert has_weights(folder)
    with pytest.raises(InputError, match=said):
        header_for_plan(folder)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"adapter_config.json": '{"base_model_name_or_path": "org/b"}'}, "an adapter of org/b;"),
        ({"adapter_config.json": "[]"}, "it is an adapter; name the folder of its base"),
        ({"adapter/adapter_config.json": "{}"}, "the run of an adapter; .*modicum merge"),
        ({"run.json": "{}"}, "a run that has exported no model"),
        ({"m.gguf": ""}, "GGUF"),
        ({"snapshots/abc/config.json": "{}"}, "snapshots/abc has one; name that folder"),
        ({"inner/config.json": "{}"}, "inner has one"),
        ({"notes.txt": ""}, "no run.json, no config.json"),
    ],
)
def test_a_folder_that_is_no_model_is_called_what_it_is(
    tmp_path: Path, files: dict[str, str], said: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=said):
        read_config(tmp_path)
