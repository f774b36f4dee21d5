"""PEFT's LoRAs with a bias: Hydra here, both ways."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modicum.adapters import Hydra, load
from modicum.adapters.travel import travel_of
from modicum.core.errors import InputError
from modicum.proofs.contracts.adapters.subjects import numbers, stir, tokens

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT takes a bias for a tensor that is sharded
TARGETS = ["q_proj", "down_proj"]


def model(*, bias: bool = True) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_attention_heads=2, num_hidden_layers=2,
        vocab_size=29, attention_bias=bias, initializer_range=0.3,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config).eval()
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            parameter.data.copy_(numbers(*parameter.shape, name=name))
    return made


def logits(made: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = made(input_ids=tokens()).logits
    return found


def theirs(**fields: Any) -> Any:
    """PEFT's, with factors and biases that do something."""
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=TARGETS, lora_bias=True, **fields)
    made = peft.get_peft_model(model(), config).eval()
    for name, parameter in made.named_parameters():
        if parameter.requires_grad:
            parameter.data.add_(numbers(*parameter.shape, name=name), alpha=0.2)
    return made


@pytest.mark.parametrize("fields", [{}, {"use_rslora": True}], ids=["plain", "stabilized"])
def test_a_file_of_peft_computes_and_trains_as_there_and_goes_back(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    twin = theirs(**fields)
    twin.save_pretrained(tmp_path / "theirs")
    ours = model()
    adapter = load(ours, tmp_path / "theirs", train=True)
    assert isinstance(adapter.method, Hydra)
    assert (adapter.method.rank, adapter.method.sequential_rank) == (2, 0)
    torch.testing.assert_close(logits(ours), logits(twin), rtol=0, atol=1e-5)
    for each in (ours, twin):
        each(input_ids=tokens()).logits.square().mean().backward()
    for name, layer in adapter.layers():
        other = twin.get_submodule(f"base_model.model.{name}").lora_B["default"].bias
        torch.testing.assert_close(layer.d_p.grad, other.grad, rtol=1e-4, atol=1e-7)
    adapter.save(tmp_path / "ours", form="peft")
    config = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert config["lora_bias"] is True
    again = peft.PeftModel.from_pretrained(model(), tmp_path / "ours").eval()
    torch.testing.assert_close(logits(again), logits(ours), rtol=0, atol=1e-5)
    with torch.no_grad():
        adapter.merge()
    torch.testing.assert_close(logits(ours), logits(twin), rtol=0, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("ranks", [(2, 2), (0, 2), (2, 0)], ids=str)
def test_peft_computes_what_any_hydra_does(
    ranks: tuple[int, int], biases: bool, bias: bool, tmp_path: Path
) -> None:
    fields = {"scale": 1.7, "learn_scale": True, "targets": TARGETS}
    ours = model(bias=bias)
    value = Hydra(rank=ranks[0], sequential_rank=ranks[1], biases=biases, **fields)
    adapter = stir(value.attach(ours))
    before = logits(model(bias=bias))
    changes = biases or (bias and ranks[1] > 0)
    travel = travel_of(adapter)
    assert travel.form == ("peft" if changes else "lora")
    assert ("it takes no `lora_bias`" in travel.reason) == changes
    adapter.save(tmp_path, form="peft")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config.get("lora_bias", False) == changes
    twin = peft.PeftModel.from_pretrained(model(bias=bias), tmp_path).eval()
    torch.testing.assert_close(logits(twin), logits(ours), rtol=0, atol=1e-5)
    assert (logits(ours) - before).abs().max() > 0.02
    other = model(bias=bias)
    load(other, tmp_path)
    torch.testing.assert_close(logits(other), logits(ours), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rank_pattern": {"q_proj": 3}}, "all layers must have one rank"),
        ({"lora_bias": "yes"}, "lora_bias: must be true or false"),
        ({"use_dora": True}, "no biases next to DoRA"),
        ({"lora_bias": False}, "not a factor of plain LoRA"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_files_that_say_something_else_are_refused(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    theirs().save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    ours = model()
    names = [name for name, _ in ours.named_modules()]
    with pytest.raises(InputError, match=said):
        load(ours, tmp_path)
    assert [name for name, _ in ours.named_modules()] == names


@pytest.mark.parametrize("spoilt", ["missing", "of another layer", "of another shape"])
def test_biases_that_are_not_the_layers(spoilt: str, tmp_path: Path) -> None:
    theirs().save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_B.bias"
    bias = tensors.pop(name)
    if spoilt == "of another layer":
        tensors[name.replace("down_proj", "up_proj")] = bias
    elif spoilt == "of another shape":
        tensors[name] = bias[1:].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    said = {"missing": "lacks a factor", "of another layer": "no such layer"}
    with pytest.raises(InputError, match=said.get(spoilt, "has shape")):
        load(model(), tmp_path)
