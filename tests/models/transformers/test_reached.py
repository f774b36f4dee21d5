"""Layers that no gradient reaches, as small models show them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from decoders import config_json

from modicum.adapters import LoRA
from modicum.core.layers.meta import on_meta
from modicum.models.transformers.config import TransformersConfig
from modicum.models.transformers.model import build

_BART: dict[str, Any] = {
    "model_type": "bart", "is_decoder": True, "is_encoder_decoder": False, "vocab_size": 320,
    "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48,
    "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
_SPARSE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
    "num_hidden_layers": 2, "first_k_dense_replace": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "kv_lora_rank": 8, "q_lora_rank": 8,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "index_n_heads": 2,
    "index_head_dim": 16, "index_topk": 8, "max_position_embeddings": 64, "pad_token_id": None,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def sparse(kind: str) -> dict[str, Any]:
    """The config.json of a model that chooses the tokens it attends to by an indexer."""
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    return {**transformers.AutoConfig.for_model(kind, **_SPARSE).to_dict(), "model_type": kind}


def ends(names: frozenset[str], part: str) -> set[str]:
    """What names have after a part that all of them have."""
    assert all(part in name for name in names)
    return {name.partition(part)[2] for name in names}


def test_cross_attention_without_an_encoder_is_not_reached() -> None:
    config = TransformersConfig.from_hf(_BART)
    before = torch.random.get_rng_state()
    with on_meta():  # where a plan builds the model
        found = config.unreached
    assert torch.equal(torch.random.get_rng_state(), before)
    assert len(found) == 8
    assert ends(found, ".encoder_attn.") == {"q_proj", "k_proj", "v_proj", "out_proj"}


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_what_chooses_tokens_is_not_reached(kind: str) -> None:
    found = TransformersConfig.from_hf(sparse(kind)).unreached
    assert len(found) == 6
    assert ends(found, ".indexer.") == {"wq_b", "wk", "weights_proj"}


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "mixtral", "bloom"])
def test_of_most_models_every_layer_is_reached(name: str) -> None:
    assert TransformersConfig.from_hf(config_json(name)).unreached == frozenset()


@pytest.mark.parametrize("kind", ["bart", "deepseek_v32"])
def test_all_linear_means_what_gets_a_gradient_and_says_what_it_leaves(kind: str) -> None:
    raw = _BART if kind == "bart" else sparse(kind)
    model = build(TransformersConfig.from_hf(raw))
    with pytest.warns(UserWarning, match="no gradient reaches it"):
        adapter = LoRA(rank=2).attach(model)
    idle = model.decoder_config.unreached
    assert not idle & adapter.sites.keys()
    assert idle <= adapter.left_out.keys()
    ids = torch.randint(0, 300, (2, 12), generator=torch.Generator().manual_seed(0))
    model(ids).square().sum().backward()
    assert all(factor.grad is not None for factor in adapter.parameters())
    adapter.detach()
    named = LoRA(rank=2, targets=("all-linear", min(idle)), exclude=("lm_head",))
    assert min(idle) in {site.name for site in named.sites(model)}
