"""Twenty tiny random decoders of transformers, and three of them at a size that counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_TOKENS: dict[str, Any] = {"vocab_size": 320, "bos_token_id": 0, "eos_token_id": 0}
_PLAIN = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    **_TOKENS,
}
_GROUPED = {**_PLAIN, "num_key_value_heads": 2, "intermediate_size": 48}
_HEADS = {**_GROUPED, "head_dim": 8}
_SCALED = {**_HEADS, "query_pre_attn_scalar": 8, "sliding_window": 5}
_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
# Ranks that share the work drop other elements than one rank does.
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# By the name that the page gives them: the config.json.
MODELS: dict[str, dict[str, Any]] = {
    "Llama 3.x, scaled positions": {"model_type": "llama", **_GROUPED, "rope_parameters": _ROPE},
    "Mistral, with its window": {"model_type": "mistral", **_HEADS, "sliding_window": 5},
    "Qwen 2": {"model_type": "qwen2", **_GROUPED},
    "Qwen 3": {"model_type": "qwen3", **_HEADS},
    "Gemma": {"model_type": "gemma", **_HEADS},
    "Gemma 2": {"model_type": "gemma2", **_SCALED},
    "Gemma 3": {
        "model_type": "gemma3_text",
        **_SCALED,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Phi-3": {"model_type": "phi3", **_GROUPED},
    "GPT-2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
              **_NO_DROPOUT, **_TOKENS},
    "GPT-NeoX": {"model_type": "gpt_neox", **_PLAIN, "intermediate_size": 48},
    "OPT": {"model_type": "opt", **_PLAIN, "ffn_dim": 48, "word_embed_proj_dim": 32,
            "dropout": 0.0},
    "Falcon": {"model_type": "falcon", **_PLAIN},
    "BLOOM": {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4, **_TOKENS},
    "OLMo 2": {"model_type": "olmo2", **_GROUPED},
    "Cohere": {"model_type": "cohere", **_GROUPED},
    "StableLM": {"model_type": "stablelm", **_GROUPED},
    "Granite": {"model_type": "granite", **_GROUPED},
    "SmolLM3": {"model_type": "smollm3", **_GROUPED},
    "Mixtral": {"model_type": "mixtral", **_GROUPED, "num_local_experts": 4},
    "Qwen 3 MoE": {"model_type": "qwen3_moe", **_HEADS, **_EXPERTS},
}  # fmt: skip
_WIDE: dict[str, Any] = {"vocab_size": 8192, "hidden_size": 384, "num_hidden_layers": 8}
_WIDE |= {"num_attention_heads": 6, "max_position_embeddings": 256}
_WIDE_GPT2: dict[str, Any] = {"vocab_size": 8192, "n_embd": 384, "n_layer": 8, "n_head": 6}
_WIDE_HEADS = {**_WIDE, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 1024}
LARGE: dict[str, dict[str, Any]] = {
    "GPT-2": {"model_type": "gpt2", **_WIDE_GPT2, "n_positions": 256},
    "Qwen 3": {"model_type": "qwen3", **_WIDE_HEADS},
    "GPT-NeoX": {"model_type": "gpt_neox", **_WIDE, "intermediate_size": 1536},
}


def write_model(folder: Path, raw: dict[str, Any]) -> Path:
    """Write a model of random weights as transformers does, the same ones each time."""
    import transformers

    fields = {"initializer_range": 0.1, "pad_token_id": None, **raw}
    made = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(made).save_pretrained(folder)
    return folder
