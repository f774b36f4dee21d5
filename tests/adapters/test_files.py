"""Broken, cut and missing adapter files: one message, and the model is left as it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from modicum.adapters import LoRA, load
from modicum.core.errors import InputError
from modicum.proofs.contracts.adapters.subjects import odd_model, stir

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    stir(LoRA(rank=2).attach(odd_model())).save(tmp_path / "adapter")
    return tmp_path / "adapter"


def refused(folder: Path, match: str) -> InputError:
    model = odd_model()
    with pytest.raises(InputError, match=match) as error:
        load(model, folder)
    assert [type(module) for module in model] == [nn.Linear, nn.Tanh, nn.Linear]
    return error.value


def test_a_good_folder_loads(folder: Path) -> None:
    model, inputs = odd_model(), torch.ones(1, 7)
    base = model(inputs)
    load(model, folder)
    assert not torch.equal(model(inputs), base)


@pytest.mark.parametrize("part", [0, 4, 200, 0.5, -1])
def test_cut_weights_are_refused(folder: Path, part: float) -> None:
    content = (folder / WEIGHTS).read_bytes()
    kept = int(len(content) * part) if isinstance(part, float) else part
    (folder / WEIGHTS).write_bytes(content[:kept])
    assert refused(folder, "cannot be read").file == folder / WEIGHTS


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    (folder / WEIGHTS).unlink()
    refused(folder, "weights are missing")
    (folder / CONFIG).unlink()
    refused(folder, "no adapter_config.json")
    refused(tmp_path / "nowhere", "no adapter_config.json")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("", "this is not JSON"),
        ('{"peft_type": "LORA", "r": ', "this is not JSON"),
        ("[1, 2]", "no JSON object"),
        ("{}", "not a LoRA adapter"),
        ('{"peft_type": "LORA", "r": 0, "lora_alpha": 1}', "above zero"),
        ('{"peft_type": "LORA", "r": "2", "lora_alpha": 1}', "above zero"),
        ('{"peft_type": "LORA", "r": 2}', "lora_alpha"),
        (b"\xff\xfe", "not UTF-8 text"),
    ],
)
def test_broken_configurations_are_refused(folder: Path, content: str | bytes, match: str) -> None:
    raw = content.encode() if isinstance(content, str) else content
    (folder / CONFIG).write_bytes(raw)
    refused(folder, match)


def test_a_missing_factor_is_refused(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors.pop("base_model.model.wide.lora_B.weight")
    save_file(tensors, folder / WEIGHTS)
    refused(folder, r"does not fit the model: .*wide\.B")


def test_a_factor_of_another_rank_is_refused(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {"r": 3}))
    refused(folder, r"does not fit the model.*shape")


def test_a_folder_is_replaced_whole(folder: Path) -> None:
    (folder / "left-over").write_text("old")
    stir(LoRA(rank=1).attach(odd_model())).save(folder)
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG, WEIGHTS]
    assert json.loads((folder / CONFIG).read_text())["r"] == 1
