"""Tiny decoders of transformers with random weights, as folders that tests load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from modicum.data.tokenizer import Tokenizer

_TOKENS: dict[str, Any] = {"vocab_size": 320, "bos_token_id": 0, "eos_token_id": 0}
_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    **_TOKENS,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 48}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **_TOKENS}
# Fused and transposed projections, scaled embeddings, norms of queries, parallel branches, absolute
# positions, a window, biases that grow with distance, experts.
DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", **_GPT2},
    "gemma": {"model_type": "gemma", "head_dim": 8, **_GROUPED},
    "qwen3": {"model_type": "qwen3", "head_dim": 8, **_GROUPED},
    "gpt_neox": {"model_type": "gpt_neox", "intermediate_size": 48, **_SIZES},
    "opt": {"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32, **_SIZES},
    "mistral": {"model_type": "mistral", "sliding_window": 5, "head_dim": 8, **_GROUPED},
    "bloom": {"model_type": "bloom", "n_layer": 2, "n_head": 4, "hidden_size": 32, **_TOKENS},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, **_GROUPED},
}


def config_json(name: str, **changes: Any) -> dict[str, Any]:
    """What the config.json of a tiny decoder holds."""
    fields = {**DECODERS[name], "initializer_range": 0.3, "pad_token_id": None, **changes}
    made = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    return {**made.to_dict(), "model_type": DECODERS[name]["model_type"]}


def decoder_folder(folder: Path, name: str, **changes: Any) -> Path:
    """Write a tiny decoder as transformers does; the same arguments give the same weights."""
    raw = config_json(name, **changes)
    made = transformers.AutoConfig.for_model(raw.pop("model_type"), **raw)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(made).save_pretrained(folder)
    return folder


def theirs(folder: Path) -> Any:
    """The model of a folder as transformers loads it."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def add_tokenizer(folder: Path, text: str) -> Path:
    """Put a tokenizer of 300 tokens into a model's folder."""
    Tokenizer.train([text], 300, lambda *_: None).save(folder)
    return folder
