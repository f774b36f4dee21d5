"""Adapters travel to PEFT and back with equal logits; what is no plain LoRA is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from modicum.adapters import LoRA, load
from modicum.core.errors import InputError
from modicum.proofs.contracts.adapters.subjects import stir

# PEFT remarks on embeddings that it saves along, and on biases that it cannot merge.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed"),
    pytest.mark.filterwarnings("ignore:Adapter 'default'. 1 LoRA tensor"),
]
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

IDS = torch.arange(24).view(2, 12) % 29
SIZES = {"vocab_size": 29, "tie_word_embeddings": False}
LLAMA = transformers.LlamaConfig(
    hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, **SIZES
)
GPT2 = transformers.GPT2Config(
    n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0, **SIZES
)


def model(config: transformers.PretrainedConfig = LLAMA) -> nn.Module:
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(5)
    return made.eval()


@torch.no_grad()
def logits(of: nn.Module) -> Tensor:
    return of(IDS).logits


def theirs(config: transformers.PretrainedConfig = LLAMA, **fields: object) -> nn.Module:
    """A PEFT model whose factors all do something."""
    wrapped = peft.get_peft_model(model(config), peft.LoraConfig(**fields))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    return wrapped.eval()


@pytest.mark.parametrize(
    ("config", "value"),
    [
        (LLAMA, LoRA(rank=3, alpha=5.0)),
        (LLAMA, LoRA(rank=2, targets=("q_proj", "model.layers.0.mlp.down_proj"))),
        (LLAMA, LoRA(rank=2, targets=("embed_tokens", "v_proj"))),
        (LLAMA, LoRA(rank=2, targets=("lm_head",))),
        (GPT2, LoRA(rank=3, targets=("c_attn", "c_fc"), alpha=12.0)),
    ],
    ids=["all-linear", "some", "embedding", "head", "conv1d"],
)
def test_peft_loads_what_we_write(
    config: transformers.PretrainedConfig, value: LoRA, tmp_path: Path
) -> None:
    ours = model(config)
    base = logits(ours)
    adapter = stir(value.attach(ours))
    adapter.save(tmp_path / "adapter", base_model="somebody/model")
    loaded = peft.PeftModel.from_pretrained(model(config), tmp_path / "adapter").eval()
    assert (logits(ours) - base).abs().max() > 0.1
    torch.testing.assert_close(logits(loaded), logits(ours), rtol=0, atol=2e-5)
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == "somebody/model"
    # PEFT's merge agrees with ours, so orientation and scale do too.
    adapter.merge()
    torch.testing.assert_close(logits(loaded.merge_and_unload()), logits(ours), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (LLAMA, {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"}),
        (LLAMA, {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "use_rslora": True}),
        (LLAMA, {"r": 2, "target_modules": ["embed_tokens", "o_proj"]}),
        (GPT2, {"r": 3, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    ],
    ids=["all-linear", "rslora", "embedding", "conv1d"],
)
def test_we_load_what_peft_writes(
    config: transformers.PretrainedConfig, fields: dict[str, object], tmp_path: Path
) -> None:
    wrapped = theirs(config, **fields)
    wrapped.save_pretrained(tmp_path)
    ours = model(config)
    base = logits(ours)
    adapter = load(ours, tmp_path)
    assert (logits(ours) - base).abs().max() > 0.1
    torch.testing.assert_close(logits(ours), logits(wrapped), rtol=0, atol=2e-5)
    assert not any(parameter.requires_grad for parameter in adapter.parameters())
    adapter.merge()
    adapter.detach()
    torch.testing.assert_close(logits(ours), logits(wrapped), rtol=0, atol=2e-5)


def test_the_scale_of_rslora_is_alpha_over_the_root_of_the_rank() -> None:
    config = {"r": 16, "lora_alpha": 8.0}
    assert LoRA.from_peft(config).scale == pytest.approx(0.5)
    assert LoRA.from_peft(config | {"use_rslora": True}).scale == pytest.approx(8 / math.sqrt(16))


def test_loading_for_training_trains_the_factors(tmp_path: Path) -> None:
    theirs(r=2, target_modules=["q_proj"]).save_pretrained(tmp_path)
    adapter = load(model(), tmp_path, name="task", train=True)
    assert adapter.name == "task"
    assert [parameter.requires_grad for parameter in adapter.parameters()] == [True, True]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 4}}, "different ranks"),
        ({"alpha_pattern": {"q_proj": 4}}, "different scales"),
        ({"bias": "all"}, "biases"),
        ({"lora_bias": True}, "biases"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_no_plain_lora_is_refused_with_one_message(
    fields: dict[str, object], said: str, tmp_path: Path
) -> None:
    wrapped = theirs(r=2, target_modules=["q_proj"], **fields)
    wrapped.save_pretrained(tmp_path)
    ours = model()
    names = [name for name, _ in ours.named_modules()]
    with pytest.raises(InputError, match=said) as error:
        load(ours, tmp_path)
    assert error.value.file == tmp_path / "adapter_config.json"
    assert str(error.value).count("\n") == 0
    assert [name for name, _ in ours.named_modules()] == names


def test_embeddings_that_were_trained_beside_the_adapter_are_refused(tmp_path: Path) -> None:
    wrapped = theirs(r=2, target_modules=["embed_tokens"])
    with torch.no_grad():
        wrapped.get_input_embeddings().base_layer.weight[3] += 1
    wrapped.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"trained or resized.*embed_tokens"):
        load(model(), tmp_path)


def test_an_adapter_on_bf16_embeddings_gives_bf16() -> None:
    ours = model().bfloat16()
    stir(LoRA(rank=2, targets=("embed_tokens",)).attach(ours))
    assert ours.model.embed_tokens(IDS).dtype == torch.bfloat16
    assert logits(ours).dtype == torch.bfloat16


def test_other_kinds_of_peft_adapters_are_refused(tmp_path: Path) -> None:
    wrapped = peft.get_peft_model(
        model(), peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    )
    wrapped.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"not a LoRA adapter .*IA3"):
        load(model(), tmp_path)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    theirs(GPT2, r=2, target_modules=["c_attn"], fan_in_fan_out=True).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"another model.*h\.0\.attn\.c_attn"):
        load(model(), tmp_path)


def test_an_adapter_of_a_wider_model_is_refused_and_the_model_left_alone(tmp_path: Path) -> None:
    wide = transformers.LlamaConfig(**(LLAMA.to_dict() | {"hidden_size": 32}))
    theirs(wide, r=2, target_modules=["q_proj"]).save_pretrained(tmp_path)
    ours = model()
    base = logits(ours)
    with pytest.raises(InputError, match="does not fit the model"):
        load(ours, tmp_path)
    assert torch.equal(logits(ours), base)
    assert type(ours.model.layers[0].self_attn.q_proj) is nn.Linear
