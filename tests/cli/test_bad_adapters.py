"""A recipe whose adapter cannot be on its model: exit 2 and one message, whichever command."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

RECIPE = """\
model: {{path: {model}}}
data: {{path: {data}, sequence_length: 16, validation_fraction: 0.25}}
adapter: {adapter}
training: {{steps: 2, batch_size: 2, learning_rate: 1e-2}}
samples: {{count: 0}}
"""
# All layers are of width 16 and more.
ROOMLESS = {
    "{method: lora, rank: 99}": "adapter.rank: above the smaller width",
    "{method: dora, rank: 99}": "adapter.rank: above the smaller width",
    "{method: pissa, rank: 99}": "adapter.rank: above 16, the smaller width",
    "{method: lora_fa, rank: 99}": "adapter.rank: above 16, the smaller width",
    "{method: lora_sb, rank: 99}": "adapter.rank: above 16, the smaller width",
    "{method: randlora, rank: 99}": "lower it, which trains more numbers",
    "{method: shira, rank: 9}": "at most 8, or exclude the layer",
    "{method: shira, rank: 9, mask: gradient}": "at most 8, or exclude the layer",
    "{method: block_lora, rank: 8, blocks: 3}": "the nearest that divides all is",
    "{method: compacter, reduction_factor: 3}": "the nearest that divides all is",
    "{method: mos, rank: 3}": "1 public rows",
    "{method: mosa, experts: 1000000}": "adapter.experts: more than the",
    "{method: flylora, rank: 4, active: 5}": "adapter.active: above the rank 4",
    "{method: salt, rank: 9}": "the directions of",
    "{method: soka, rank: 999}": "the Kronecker terms of the layer",
    "{method: snella, rank: 5}": "the next that they do is 6",
    "{method: hydra, rank: 0, sequential_rank: 0}": "must be above 0",
    "{method: diffora, rho: 0.0, share: false}": "it selects no layer",
    "{method: s2ft, neurons: 0.0}": "neither neurons nor groups are trained",
    "{method: lora, targets: [q_prj]}": "q_proj",
    "{method: randlora, rank: 4, bases: stored}": "frozen tensors from a file here; give its",
    "{method: shira, rank: 2, mask: stored}": "frozen tensors from a file here; give its",
    "{method: lora_fa, rank: 2, init: stored}": "frozen tensors from a file here; give its",
    "{method: svfit, rank: 4, energy: 1.5}": "adapter.energy",
}
# What the weights or the data say is known when the run begins.
LATER = {
    "{method: pissa, rank: 4}": "above 0, the rank of the weight of",
    "{method: svfit, rank: 4}": "its weight is zero",
    "{method: lora_xs, rank: 4}": "above 0, the rank of the weight of",
    "{method: loldu}": "its weight is zero",
    "{method: salt, rank: 4}": "its weight is zero",
    "{method: soka, rank: 2}": "its weight is zero",
    "{method: soka, rank: null}": "its weight is zero",
    "{method: s2ft, neurons: 0.001}": "nothing is chosen",
    "{method: lora_sb, rank: 4, targets: [down_proj]}": "no gradient at this layer",
}


def written(folder: Path, runs: Any, adapter: str, model: Path) -> Path:
    file = folder / "recipe.yaml"
    data = runs.recipe.parent / "texts"
    file.write_text(RECIPE.format(model=model, data=data, adapter=adapter))
    return file


def one_message(ended: Any) -> str:
    assert ended.code == 2, ended.err
    assert ended.out == ""
    assert ended.err.startswith("modicum: ")
    assert ended.err.count("\n") == 1, ended.err
    return str(ended.err)


@pytest.mark.parametrize("adapter", ROOMLESS)
def test_a_plan_refuses_what_a_layer_has_no_room_for(
    modicum: Any, runs: Any, tmp_path: Path, adapter: str
) -> None:
    recipe = written(tmp_path, runs, adapter, runs.new)
    said = one_message(modicum("plan", recipe))
    assert ROOMLESS[adapter] in said
    assert one_message(modicum("train", recipe, "--out", tmp_path / "run", "--quiet")) == said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("adapter", LATER)
def test_a_run_refuses_what_weights_and_data_do_not_have(
    modicum: Any, runs: Any, tmp_path: Path, adapter: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(runs.new / "model", model)
    file = model / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        zero = name.endswith(("down_proj.weight", "up_proj.weight"))
        tensors[name] = torch.zeros_like(tensor) if zero else tensor
    save_file(tensors, file, metadata={"format": "pt"})
    before = file.read_bytes()
    recipe = written(tmp_path, runs, adapter, model)
    assert modicum("plan", recipe).code == 0
    ended = modicum("train", recipe, "--out", tmp_path / "run", "--quiet")
    assert LATER[adapter] in one_message(ended)
    assert file.read_bytes() == before
