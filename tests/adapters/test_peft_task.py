"""Whatever the model is, PEFT loads what is saved for it, by the class that is right for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modicum.adapters import LoRA, load
from modicum.core.errors import InputError
from modicum.proofs.contracts.adapters.subjects import stir

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
# PEFT remarks on layers of two kinds, and transformers on what PEFT asks it.
pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out", "ignore:`is_gradient")

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 29,
    "pad_token_id": 0,
}
CONFIGS = {
    "Bert": transformers.BertConfig(**SIZES),
    "Roberta": transformers.RobertaConfig(**SIZES, max_position_embeddings=40),
    "DistilBert": transformers.DistilBertConfig(
        dim=16, hidden_dim=24, n_layers=1, n_heads=2, vocab_size=29
    ),
    "ViT": transformers.ViTConfig(
        **{key: SIZES[key] for key in list(SIZES)[:4]}, image_size=8, patch_size=4
    ),
    "Llama": transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
    "GPT2": transformers.GPT2Config(
        n_embd=16, n_layer=1, n_head=2, n_positions=32, vocab_size=29, pad_token_id=0
    ),
    "Mamba": transformers.MambaConfig(
        hidden_size=16, num_hidden_layers=1, state_size=4, vocab_size=29, pad_token_id=0
    ),
    "Qwen2Moe": transformers.Qwen2MoeConfig(
        **(SIZES | {"num_key_value_heads": 2, "moe_intermediate_size": 8}),
        shared_expert_intermediate_size=8,
        num_experts=2,
        num_experts_per_tok=1,
    ),
    "T5": transformers.T5Config(
        d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, vocab_size=29
    ),
}
IDS = torch.arange(16).view(2, 8) % 28 + 1


def made(name: str) -> nn.Module:
    config = next(config for kind, config in CONFIGS.items() if name.startswith(kind))
    torch.manual_seed(0)
    return getattr(transformers, name)(config).eval()


@torch.no_grad()
def output(model: nn.Module, name: str) -> Tensor:
    inputs: dict[str, Any] = {"input_ids": IDS}
    if name.startswith("ViT"):
        inputs = {"pixel_values": torch.linspace(-1, 1, 384).view(2, 3, 8, 8)}
    if name.startswith("T5"):
        inputs["decoder_input_ids"] = IDS
    return model(**inputs)[0]


@pytest.mark.parametrize(
    ("name", "exclude", "task"),
    [
        ("BertModel", (), "FEATURE_EXTRACTION"),
        ("BertForMaskedLM", (), None),
        ("BertForSequenceClassification", ("classifier",), "SEQ_CLS"),
        ("BertForSequenceClassification", (), None),  # PEFT has no factors in a head
        ("BertForTokenClassification", ("classifier",), "TOKEN_CLS"),
        ("BertForQuestionAnswering", ("qa_outputs",), "QUESTION_ANS"),
        ("RobertaForSequenceClassification", ("classifier.*",), "SEQ_CLS"),
        ("DistilBertForSequenceClassification", ("*classifier",), "SEQ_CLS"),
        ("DistilBertForSequenceClassification", ("classifier",), None),
        ("ViTForImageClassification", (), None),
        ("ViTModel", (), None),
        ("LlamaForCausalLM", (), "CAUSAL_LM"),
        ("GPT2LMHeadModel", (), "CAUSAL_LM"),
        ("GPT2ForSequenceClassification", (), None),
        ("T5ForConditionalGeneration", (), "SEQ_2_SEQ_LM"),
    ],
)
def test_peft_loads_it_with_equal_outputs(
    name: str, exclude: tuple[str, ...], task: str | None, tmp_path: Path
) -> None:
    ours, plain = made(name), made(name)
    before = output(ours, name)
    stir(LoRA(rank=2, exclude=exclude).attach(ours)).save(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["task_type"] == task
    assert (config["auto_mapping"] or {}).get("base_model_class") == (None if task else name)
    assert not torch.allclose(output(ours, name), before, rtol=0, atol=1e-5)
    loaded = peft.PeftModel.from_pretrained(made(name), tmp_path).eval()
    torch.testing.assert_close(output(loaded, name), output(ours, name), rtol=0, atol=1e-5)
    load(plain, tmp_path)
    assert torch.equal(output(plain, name), output(ours, name))


@pytest.mark.filterwarnings("ignore:all-linear leaves out")
@pytest.mark.parametrize(("name", "said"), [("Qwen2MoeForCausalLM", "fused experts.*_proj")])
def test_what_peft_would_read_as_something_else_is_kept_in_our_form(
    name: str, said: str, tmp_path: Path
) -> None:
    ours, plain = made(name), made(name)
    adapter = stir(LoRA(rank=2).attach(ours))
    with pytest.raises(InputError, match=said):
        adapter.save(tmp_path / "peft", form="peft")
    assert not (tmp_path / "peft").exists()
    adapter.save(tmp_path / "own")
    load(plain, tmp_path / "own")
    assert torch.equal(output(plain, name), output(ours, name))


@pytest.mark.parametrize(
    ("name", "exclude", "auto"),
    [
        ("BertForSequenceClassification", ("classifier",), "ForSequenceClassification"),
        ("ViTForImageClassification", (), ""),
        ("LlamaForCausalLM", (), "ForCausalLM"),
    ],
)
def test_pefts_auto_class_makes_the_base_model_too(
    name: str, exclude: tuple[str, ...], auto: str, tmp_path: Path
) -> None:
    ours = made(name)
    ours.save_pretrained(tmp_path / "model")
    adapter = stir(LoRA(rank=2, exclude=exclude).attach(ours))
    adapter.save(tmp_path / "adapter", base_model=str(tmp_path / "model"))
    loaded = getattr(peft, f"AutoPeftModel{auto}").from_pretrained(tmp_path / "adapter").eval()
    torch.testing.assert_close(output(loaded, name), output(ours, name), rtol=0, atol=1e-5)


def test_an_adapter_with_a_head_is_for_a_model_with_the_same_head(tmp_path: Path) -> None:
    name = "BertForSequenceClassification"
    LoRA(rank=2, exclude=("classifier",)).attach(made(name)).save(tmp_path)
    other = made(name)
    with torch.no_grad():
        other.classifier.weight += 1
    with pytest.raises(InputError, match=r"trained or resized.*classifier\.weight"):
        load(other, tmp_path)


def nested() -> nn.Module:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), inner, nn.Linear(4, 2))


@pytest.mark.parametrize("targets", [("all-linear",), ("2.0",), ("2.0", "3"), ("3",)])
def test_peft_finds_just_the_adapted_layers_of_a_plain_module(
    targets: tuple[str, ...], tmp_path: Path
) -> None:
    ours, inputs = nested(), torch.ones(1, 4)
    adapter = stir(LoRA(rank=2, targets=targets).attach(ours))
    adapter.save(tmp_path)
    loaded = peft.PeftModel.from_pretrained(nested(), tmp_path)
    torch.testing.assert_close(loaded(inputs), ours(inputs), rtol=0, atol=1e-6)
    layers = {n for n, m in loaded.base_model.model.named_modules() if hasattr(m, "lora_A")}
    assert layers == adapter.sites.keys()


def test_a_name_that_is_the_end_of_another_chooses_its_own_layer(tmp_path: Path) -> None:
    ours, other, inputs = nested(), nested(), torch.ones(1, 4)
    stir(LoRA(rank=2, targets=("0",), exclude=("2.0",)).attach(ours)).save(tmp_path)
    loaded = peft.PeftModel.from_pretrained(nested(), tmp_path)
    torch.testing.assert_close(loaded(inputs), ours(inputs), rtol=0, atol=1e-6)
    assert list(load(other, tmp_path).sites) == ["0"]
    assert torch.equal(other(inputs), ours(inputs))
