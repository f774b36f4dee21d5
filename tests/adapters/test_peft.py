"""Adapters travel to PEFT and back with equal logits; what is no plain LoRA is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modicum.adapters import LoRA, load, peft_config
from modicum.core.errors import InputError
from modicum.proofs.contracts.adapters.subjects import stir

# PEFT remarks on embeddings that it saves along, and on biases that it cannot merge.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
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


def test_what_is_no_plain_lora_is_refused_with_one_message(tmp_path: Path) -> None:
    wrapped = theirs(r=2, target_modules=["q_proj"], bias="all")
    wrapped.save_pretrained(tmp_path)
    ours = model()
    names = [name for name, _ in ours.named_modules()]
    with pytest.raises(InputError, match="biases") as error:
        load(ours, tmp_path)
    assert error.value.file == tmp_path / "adapter_config.json"
    assert str(error.value).count("\n") == 0
    assert [name for name, _ in ours.named_modules()] == names


def test_every_field_of_the_installed_peft_is_classified() -> None:
    classified = {*peft_config.READ, *peft_config.HARMLESS, *peft_config.REFUSED}
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} <= classified


def test_what_peft_writes_by_default_is_off_or_understood(plain: Path) -> None:
    written = json.loads((plain / "adapter_config.json").read_text())
    for field in dataclasses.fields(peft.LoraConfig):
        if field.name in peft_config.REFUSED:
            assert not written[field.name]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA that PEFT has written."""
    folder = tmp_path_factory.mktemp("plain")
    theirs(r=2, lora_alpha=3, target_modules=["q_proj", "v_proj"]).save_pretrained(folder)
    return folder


def edited(plain: Path, folder: Path, change: dict[str, object]) -> Path:
    """The same adapter with another configuration."""
    shutil.copytree(plain, folder, dirs_exist_ok=True)
    config = json.loads((plain / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | change))
    return folder


ACCEPTED: list[dict[str, object]] = [
    {"init_lora_weights": "gaussian"},
    {"init_lora_weights": "orthogonal"},
    {"init_lora_weights": "mica"},
    {"init_lora_weights": "eva", "eva_config": {"rho": 1.0}},
    {"init_lora_weights": False},
    {"corda_config": {"corda_method": "ipm"}, "loftq_config": {"loftq_bits": 4}},
    {"lora_ga_config": {"direction": "ArBr"}, "eva_config": {"rho": 1.0}},
    {"fan_in_fan_out": True, "inference_mode": False, "ensure_weight_tying": True},
    {"task_type": "CAUSAL_LM", "revision": "main", "peft_version": "99", "auto_mapping": None},
    {"runtime_config": {"ephemeral_gpu_offload": False}, "megatron_core": "another"},
    {"merge_weights": True, "enable_lora": None},
    {"qalora_group_size": 4, "from_a_later_peft": None, "and_this": [], "and_that": False},
    {"rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": [], "target_parameters": []},
    {"alora_invocation_tokens": [], "layer_replication": [], "megatron_config": {}},
    {"use_rslora": True, "lora_alpha": 2.5, "lora_dropout": 0.5},
    {"target_modules": r".*\.(q|v)_proj"},
    {"target_modules": "all-linear"},
    {"target_modules": ["self_attn.q_proj", "v_proj"], "exclude_modules": ["mlp.v_proj"]},
    {"layers_to_transform": 0},
    {"layers_to_transform": [0, 7], "layers_pattern": "layers"},
]


@pytest.mark.filterwarnings("ignore")  # PEFT remarks on keys that it does not use
@pytest.mark.parametrize("change", ACCEPTED, ids=lambda change: ",".join(change))
def test_what_is_accepted_gives_the_logits_that_peft_gives(
    change: dict[str, object], plain: Path, tmp_path: Path
) -> None:
    folder = edited(plain, tmp_path / "adapter", change)
    loaded = peft.PeftModel.from_pretrained(model(), folder).eval()
    ours = model()
    load(ours, folder)
    torch.testing.assert_close(logits(ours), logits(loaded), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *[
            ({"init_lora_weights": start}, "path_initial_model_for_weight_conversion")
            for start in ("pissa", "pissa_niter_4", "olora", "OLoRA", "corda", "lora_ga")
        ],
        ({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}, "quantized the base"),
        ({"init_lora_weights": "newest"}, "no such start"),
        ({"init_lora_weights": 1}, "no such start"),
        ({"alora_invocation_tokens": [3, 4]}, "aLoRA"),
        ({"use_qalora": True}, "QALoRA"),
        ({"use_bdlora": {"nblocks": 2}}, "BD-LoRA"),
        ({"kasa_config": {}}, "KaSA"),
        ({"velora_config": {"num_groups": 4}}, "VeLoRA"),
        ({"monteclora_config": {"num_samples": 4}}, "MonteCLoRA"),
        ({"arrow_config": {"top_k": 2}}, "Arrow"),
        ({"trainable_token_indices": []}, "rows of embeddings"),
        ({"layer_replication": [[0, 1]]}, "repeated"),
        ({"target_parameters": ["weight"]}, "no layers"),
        ({"megatron_config": {"a": 1}}, "Megatron"),
        ({"enable_lora": [True, False]}, "fused"),
        ({"from_a_later_peft": 0.5}, "not known"),
        ({"from_a_later_peft": 0}, "not known"),
        ({"r": 2.5}, "integer"),
        ({"r": True}, "integer"),
        ({"lora_alpha": float("nan")}, "above zero"),
        ({"lora_dropout": "0"}, "below 1"),
        ({"use_rslora": "no"}, "true or false"),
        ({"target_modules": "(q"}, "regular expression"),
        ({"target_modules": "q{99999999999}"}, "regular expression"),
        ({"rank_pattern": {"(?i)q_proj": 4}}, "regular expression"),
        ({"layers_to_transform": 0, "layers_pattern": "(layers)"}, "its first group"),
        ({"layers_to_transform": 0, "layers_pattern": "model|h"}, "leaves out"),
        ({"target_modules": [1]}, "list of names"),
        ({"target_modules": ["q_proj"]}, "leaves out.*v_proj"),
        ({"exclude_modules": ".*v_proj"}, "leaves out.*v_proj"),
        ({"layers_to_transform": [1]}, "leaves out"),
        ({"layers_to_transform": "1"}, "number"),
        ({"target_modules": "all-linear", "init_lora_weights": False}, "would be random"),
    ],
    ids=lambda value: repr(value) if isinstance(value, dict) else "",
)
def test_what_peft_does_otherwise_is_refused_by_the_key(
    change: dict[str, object], said: str, plain: Path, tmp_path: Path
) -> None:
    folder = edited(plain, tmp_path / "adapter", change)
    ours = model()
    with pytest.raises(InputError, match=said) as error:
        load(ours, folder)
    assert error.value.file == folder / "adapter_config.json"
    assert error.value.field in change
    assert str(error.value).count("\n") == 0
    assert type(ours.model.layers[0].self_attn.q_proj) is nn.Linear


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.layers.0.self_attn.q_proj.lora_magnitude_vector", "not a factor of plain LoRA"),
        ("model.layers.0.self_attn.q_proj.lora_B.bias", "not a factor of plain LoRA"),
        ("model.layers.0.self_attn.q_proj.lora_A.default.weight", "not a factor of plain LoRA"),
        ("model.norm.lora_A.weight", "not a factor of plain LoRA"),
        ("model.norm.weight", "base weight was trained"),
        ("model.layers.7.self_attn.q_proj.lora_A.weight", "no such layer"),
    ],
)
def test_tensors_that_are_not_understood_are_refused_by_name(
    name: str, said: str, plain: Path, tmp_path: Path
) -> None:
    folder = edited(plain, tmp_path / "adapter", {})
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file) | {f"base_model.model.{name}": torch.ones(2)}, file)
    with pytest.raises(InputError, match=f"{said}.*{re.escape(name)}"):
        load(model(), folder)


@pytest.mark.filterwarnings("ignore:(PiSSA|OLoRA) changes the base weights")
@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_an_adapter_that_peft_has_converted_loads(start: str, tmp_path: Path) -> None:
    fields = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": start}
    wrapped = peft.get_peft_model(model(), peft.LoraConfig(**fields))
    wrapped.save_pretrained(tmp_path / "first")
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.add_(0.1)
    first = str(tmp_path / "first")
    wrapped.save_pretrained(tmp_path / "last", path_initial_model_for_weight_conversion=first)
    ours = model()
    load(ours, tmp_path / "last")
    torch.testing.assert_close(logits(ours), logits(wrapped), rtol=0, atol=1e-4)


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
