"""Which full model a small one is a part of: in memory, in its folder, and by layer."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from modicum.compress import StructuredPruning, load
from modicum.core.errors import InputError
from modicum.core.layers.full_model import (
    COMPRESSION,
    FullModel,
    full_model_of,
    note_full_model,
    parts_of_full,
)
from modicum.core.layers.layer_sites import survey
from modicum.core.layers.map import Reduction
from modicum.models import create, huggingface, saving
from modicum.models.config import ModelConfig

CONFIG = ModelConfig(
    vocabulary_size=11, width=16, layers=2, heads=4, kv_heads=2, mlp_width=22, mlp_bias=True
)
PRUNING = StructuredPruning(score="random", neurons=0.4, groups=0.5, first_blocks=1)


def pruned() -> tuple[nn.Module, Any]:
    model = create(CONFIG, seed=0)
    handle = PRUNING.fit(model, PRUNING.calibrate(model, [], lambda model, batch: torch.zeros(1)))
    return model, handle


def test_a_pruned_model_knows_its_part_until_it_is_full_again(tmp_path: Path) -> None:
    model, handle = pruned()
    full = full_model_of(model)
    assert full is not None
    assert full.reduction == handle.reduction
    assert full_model_of(copy.deepcopy(model)) == full
    assert parts_of_full(nn.ModuleDict({"inner": model})) == {"inner": full}
    handle.save(tmp_path / "small")
    again = create(CONFIG, seed=1)
    load(again, tmp_path / "small")
    assert full_model_of(again) == full
    handle.merge()
    assert full_model_of(model) is None


def test_layers_say_what_they_are_of_the_full_ones() -> None:
    model, handle = pruned()
    for prefix, root in (("", model), ("inner.", nn.ModuleDict({"inner": model}))):
        sites = survey(root).sites
        lost = {name.removeprefix(prefix) for name, site in sites.items() if site.part}
        mlp = {f"model.layers.1.mlp.{each}_proj" for each in ("gate", "up", "down")}
        assert lost == mlp | {f"model.layers.1.self_attn.{each}_proj" for each in "qkvo"}
        for name in lost:
            part = sites[f"{prefix}{name}"].part
            assert part is not None
            weight = model.get_submodule(name).get_parameter("weight")
            a, b = torch.ones(3, weight.shape[1]), torch.ones(weight.shape[0], 3)
            wide_a, wide_b = part.factors(a, b)
            full = handle.reduction.restored(f"{name}.weight", weight)
            assert (wide_b @ wide_a).shape == full.shape
            kept = part.kept(a)
            assert (kept is None) == (full.shape[1] == weight.shape[1])
            if kept is not None:
                gone = handle.reduction.removed_places(f"{name}.weight", 1)
                assert sorted([*kept.tolist(), *gone.tolist()]) == list(range(full.shape[1]))
    digests = {survey(model).sites[name].part.digest for name in mlp}  # type: ignore[union-attr]
    assert len(digests) == 2  # gate and up lost the same rows


def test_a_folder_says_it_and_other_weights_are_noticed(tmp_path: Path) -> None:
    model, handle = pruned()
    note_full_model(model, FullModel(handle.reduction, "/there", {"model.safetensors": "sha256:1"}))
    saving.save(model, tmp_path / "small")  # type: ignore[arg-type]
    assert FullModel.read(tmp_path / "small") is None
    full = full_model_of(model)
    assert full is not None
    full.write(tmp_path / "small", {"method": "random"})
    assert json.loads((tmp_path / "small" / COMPRESSION).read_text())["method"] == "random"
    read = FullModel.read(tmp_path / "small")
    assert read is not None
    assert read == full_model_of(huggingface.load(tmp_path / "small"))
    assert read == full
    for name, tensor in create(CONFIG, seed=0).state_dict().items():
        assert torch.equal(read.reduction.reduced(name, tensor), model.state_dict()[name]), name
    other, _ = pruned()
    nn.init.normal_(other.get_parameter("model.norm.weight"))
    saving.save(other, tmp_path / "other")  # type: ignore[arg-type]
    (tmp_path / "small" / COMPRESSION).rename(tmp_path / "other" / COMPRESSION)
    with pytest.raises(InputError, match="these are others"):
        FullModel.read(tmp_path / "other")


def test_what_is_damaged_or_of_another_model_is_refused(tmp_path: Path) -> None:
    _, handle = pruned()
    good = handle.reduction.described()
    assert Reduction.from_description(good).described() == good
    first = good[0]
    for wrong in (
        7,
        [7],
        [{**first, "kept": []}],
        [{**first, "kept": [3, 1]}],
        [{**first, "kept": [first["count"]]}],
        [{**first, "count": "2"}],
        [{**first, "count": 0}],
        [{**first, "makers": [["w", 0, 0, [3], [1, 1]]]}],
        [{**first, "makers": [["w", 0, -1, [first["count"]], [1]]]}],
        [{**first, "makers": [["w", 0, 0, [first["count"], 1 << 40], [1, 1]]]}],
        [{key: value for key, value in first.items() if key != "kind"}],
    ):
        with pytest.raises(InputError, match="which units"):
            Reduction.from_description(wrong)
    (tmp_path / COMPRESSION).write_text(json.dumps({"units": good, "weights": {}, "full_model": 3}))
    with pytest.raises(InputError, match="does not say which model"):
        FullModel.read(tmp_path)
    with pytest.raises(InputError, match="of another model"):
        note_full_model(nn.Sequential(nn.Linear(2, 2)), FullModel(handle.reduction))
