"""Blocks that differ from the model's others: widths and wiring, in configuration and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.test_llama import lively, small
from torch import Tensor

from modicum.adapters import LoRA
from modicum.core.errors import InputError
from modicum.core.layers.form_plan import FormPlan
from modicum.core.layers.map import MappedBlock, Units, find_map, remove, silence
from modicum.models import Llama, ModelConfig, create, huggingface, load, read_config, save

NARROW = {"heads": 2, "kv_heads": 1, "mlp_width": 10}
FORMS = FormPlan().with_block("model.layers.1", **NARROW)
WIRED = FORMS.with_block("model.layers.1", mixer_skips=[1], mlp_skips=[[1, 2]])


def made(forms: FormPlan = FORMS, **changes: Any) -> ModelConfig:
    return small(layers=3, attention_bias=True, forms=forms, **changes)


def tokens(length: int = 12) -> Tensor:
    return torch.arange(2 * length).reshape(2, length) % 29


def test_a_block_has_the_sizes_that_the_plan_gives_it() -> None:
    config = made()
    model = create(config, seed=0)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes == config.parameter_shapes()
    assert config.parameter_count() == sum(p.numel() for p in model.parameters())
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == (8, 16)
    assert shapes["model.layers.1.self_attn.k_proj.bias"] == (4,)
    assert shapes["model.layers.1.mlp.down_proj.weight"] == (16, 10)
    assert shapes["model.layers.2.self_attn.q_proj.weight"] == (16, 16)
    assert [state.keys.shape[2] for state in model.new_states(1, 4).layers] == [2, 1, 2]


def test_what_is_the_models_own_is_left_out() -> None:
    same = FormPlan().with_block("model.layers.0", heads=4, kv_heads=2, mlp_width=24)
    assert made(same) == made(FormPlan())
    assert made(same).forms.plain
    assert made(FORMS.with_block("model.layers.1", mlp_width=24)).forms.blocks[
        "model.layers.1"
    ].widths == {"heads": 2, "kv_heads": 1}


@pytest.mark.parametrize(
    ("block", "own", "problem"),
    [
        ("model.layers.3", {"heads": 2}, r"blocks.model.layers.3: .*Did you mean"),
        ("model.layers.0.mlp", {"heads": 2}, "this names none"),
        ("model.layers.0", {"heads": 3}, r"layers.0.kv_heads: the 3 heads must be a multiple"),
        ("model.layers.0", {"kv_heads": 3}, r"layers.0.kv_heads: the 4 heads must be a multiple"),
        ("model.layers.0", {"mixer_skips": [1]}, r"layers.0.mixer_skips: counts back beyond"),
        ("model.layers.1", {"mlp_skips": [4]}, r"layers.1.mlp_skips: .*\(found: 4\).*1 to 3"),
    ],
)
def test_what_no_block_can_be_is_refused(block: str, own: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        made(FormPlan().with_block(block, **own))


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_configurations_travel(model_type: str) -> None:
    config = made(WIRED, model_type=model_type)
    raw = json.loads(json.dumps(config.to_hf()))
    assert raw["model_type"] == f"forms_{model_type}"
    assert raw["forms"]["blocks"] == {
        "model.layers.1": {**NARROW, "mixer_skips": [1], "mlp_skips": [[1, 2]]}
    }
    assert ModelConfig.from_hf(raw) == config
    raw["forms"]["blocks"]["model.layers.1"]["heads"] = 0
    with pytest.raises(InputError, match=r"^a\.json: forms.blocks.model.layers.1.heads: must be"):
        ModelConfig.from_hf(raw, "a.json")


@pytest.mark.parametrize("forms", [FORMS, WIRED], ids=["widths", "wiring"])
def test_folders_hold_them(tmp_path: Path, forms: FormPlan) -> None:
    model = lively(made(forms))
    folder = save(model, tmp_path / "model", shard_bytes=2000)
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert read_config(folder) == model.config
    expected = model(tokens())
    assert torch.equal(load(folder)(tokens()), expected)
    coded = load(folder, linear=FormPlan().with_default("nf4"))
    assert coded.config.forms.blocks == forms.blocks
    filled = create(model.config, seed=3)
    huggingface.fill(filled, folder)
    assert torch.equal(filled(tokens()), expected)


def test_another_library_does_not_take_them_for_its_own(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    plain = FormPlan().with_block("model.layers.1", mlp_skips=[1])  # no tensor of another shape
    folder = save(lively(made(plain)), tmp_path / "model")
    with pytest.raises((ValueError, KeyError), match="forms_llama"):
        transformers.AutoModelForCausalLM.from_pretrained(folder)


def removed(model: Llama, units: Units, which: list[int]) -> None:
    silence(model, units, which)
    remove(model, units, which)


@pytest.mark.parametrize("forms", [FormPlan(), WIRED], ids=["plain", "wiring"])
def test_after_the_map_removed_parts_the_configuration_says_so(
    tmp_path: Path, forms: FormPlan
) -> None:
    model = lively(made(forms, heads=8, kv_heads=4, width=32))
    before = {number: model.layer_map().blocks[number] for number in range(3)}
    removed(model, before[0].attentions[0].heads, [0, 3, 4, 7])
    removed(model, before[2].attentions[0].groups, [1])
    removed(model, before[2].mlps[0].neurons, [0, 5, 23])
    config = model.config
    assert [config.heads_of(n) for n in (0, 2)] == [4, 6]
    assert [config.kv_heads_of(n) for n in (0, 2)] == [4, 3]
    assert [config.mlp_width_of(n) for n in (0, 2)] == [24, 21]
    assert config.heads == 8
    assert config.forms.block("model.layers.1") == forms.block("model.layers.1")
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes == config.parameter_shapes()
    assert model.layer_map().blocks[2].attentions[0].heads.count == 6
    again = load(save(model, tmp_path / "model"))
    assert again.config == config
    assert torch.equal(again(tokens()), model(tokens()))


def test_a_map_by_arithmetic_is_the_one_that_is_found() -> None:
    model = lively(made(WIRED))
    own, found = model.layer_map(), find_map(model)
    for mine, theirs in zip(own.blocks, found.blocks, strict=True):
        assert mine.name == theirs.name
        assert all(each.checked for each in units_of(theirs))
        assert [each.count for each in units_of(mine)] == [each.count for each in units_of(theirs)]


def units_of(block: MappedBlock) -> list[Units]:
    attention, mlp = block.attentions[0], block.mlps[0]
    return [attention.heads, attention.groups, mlp.neurons]


def test_adapters_of_layers_work_on_them(tmp_path: Path) -> None:
    model = lively(made(WIRED))
    expected = model(tokens())
    adapter = LoRA(rank=2).attach(model)
    assert torch.equal(model(tokens()), expected)
    model(tokens()).sum().backward()
    assert all(value.grad is not None for value in model.parameters() if value.requires_grad)
    adapter.merge()
    assert torch.allclose(model(tokens()), expected, atol=1e-5)
