"""Smaller models of the same architecture."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers

from modicum.models.transformers.reduced import WAYS, Way, reduced
from modicum.models.transformers.shown import shown, small_model

_FIRST = Way(narrow=True)
_HEADS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
_SIZES = _HEADS | {"intermediate_size": 96, "head_dim": 16, "num_key_value_heads": 2}


def raw_of(kind: str, **fields: Any) -> dict[str, Any]:
    """A config.json as transformers writes it."""
    made = transformers.AutoConfig.for_model(kind, **fields)
    found: dict[str, Any] = json.loads(made.to_json_string(use_diff=False))
    return found


@pytest.mark.parametrize("kind", ["cwm", "modernbert-decoder"])
def test_special_tokens_stay_and_are_among_those_that_there_are(kind: str) -> None:
    made = reduced(raw_of(kind), 61, _FIRST)
    assert made["vocab_size"] == 61
    assert made["bos_token_id"] == 60
    if kind == "cwm":
        assert made["eos_token_id"] == [60, 60, 60]


def test_every_vocabulary_is_reduced() -> None:
    made = reduced(raw_of("gemma4_text"), 61, _FIRST)
    assert (made["vocab_size"], made["vocab_size_per_layer_input"]) == (61, 61)


def test_what_is_said_of_single_blocks_is_said_of_those_that_stay() -> None:
    made = reduced(raw_of("gemma4_text"), 61, _FIRST)
    assert made["num_hidden_layers"] == len(made["layer_types"]) == 6
    assert [int(number) for number in made["per_layer_config"]] == [5]
    # Of 35 blocks the last 15 have no keys of their own.
    made = reduced(raw_of("gemma3n_text"), 61, _FIRST)
    assert (made["num_hidden_layers"], made["num_kv_shared_layers"]) == (8, 3)
    assert set(made["layer_types"][:5]) == set(made["layer_types"])
    made = reduced(raw_of("zamba2"), 61, _FIRST)
    assert made["hybrid_layer_ids"] == [6]


def test_the_first_blocks_that_are_dense_do_not_hide_those_with_experts() -> None:
    made = reduced(raw_of("deepseek_v3"), 61, _FIRST)
    assert (made["first_k_dense_replace"], made["num_hidden_layers"]) == (1, 2)


def test_windows_and_chunks_are_shorter_than_a_row() -> None:
    assert reduced(raw_of("modernbert-decoder"), 61, _FIRST)["local_attention"] == 4
    assert reduced(raw_of("llama4_text"), 61, _FIRST)["attention_chunk_size"] == 4
    assert reduced(raw_of("mamba2"), 61, WAYS[3])["chunk_size"] == 16
    assert reduced(raw_of("qwen2"), 61, _FIRST)["max_window_layers"] <= 2


def test_widths_are_divided_and_numbers_of_heads_are_not() -> None:
    raw = raw_of("mamba2")
    made = reduced(raw, 61, Way(narrow=False, thinner=16))
    assert made["hidden_size"] == raw["hidden_size"] // 16
    assert made["head_dim"] == raw["head_dim"] // 16
    assert (made["num_heads"], made["conv_kernel"]) == (raw["num_heads"], raw["conv_kernel"])


@pytest.mark.parametrize(
    ("kind", "fields", "packing"),
    [
        ("cwm", _SIZES, "positions"),
        ("modernbert-decoder", {"hidden_size": 64, "num_attention_heads": 4}, "positions"),
        ("gemma4_text", _SIZES | {"hidden_size_per_layer_input": 16}, "positions"),
        # Blocks at the end take the keys of others, of each kind.
        ("gemma3n_text", _SIZES | {"hidden_size_per_layer_input": 16}, "positions"),
        # One block shares the weights of another of its kind.
        ("zamba", _HEADS | {"intermediate_size": 96}, "none"),
        # Chunks of attention are those of the row.
        ("llama4_text", _SIZES | {"intermediate_size_mlp": 96}, "none"),
    ],
)
def test_small_models_run(kind: str, fields: dict[str, Any], packing: str) -> None:
    raw = raw_of(kind, **fields)
    assert small_model(raw) is not None
    found = shown(raw)
    assert (found.refused, found.packing) == (None, packing)


def test_a_refusal_says_why_no_small_model_runs() -> None:
    raw = raw_of("deepseek_v2", num_experts_per_tok=None)
    refused = shown(raw).refused
    assert refused is not None
    assert "topk(): argument 'k' must be int, not NoneType" in refused
