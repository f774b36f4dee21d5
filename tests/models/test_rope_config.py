"""Rotary positions of config.json: read as transformers reads them, or refused."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from modicum.core.errors import InputError
from modicum.models import ModelConfig
from modicum.models.rope import inverse_frequencies

CONTEXT = 64
SIZES = {
    "model_type": "llama",
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
ENTRIES: tuple[Any, ...] = (
    None,
    {},
    {"rope_type": "default"},
    {"rope_theta": 7e3},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "linear", "type": "yarn", "factor": 2.0, "rope_theta": 5e3},
    LLAMA3,
    LLAMA3 | {"original_max_position_embeddings": 16, "rope_theta": 3e3},
    YARN,
    YARN | {"rope_theta": 2e3},
    DYNAMIC,
    {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
)
BESIDE: tuple[dict[str, Any], ...] = (
    {},
    {"rope_theta": 9e3},
    {"original_max_position_embeddings": 8},
    {"partial_rotary_factor": 0.5},
)


def theirs(raw: dict[str, Any]) -> torch.Tensor:
    """The frequencies of transformers; of a kind that changes them as it goes, the first ones."""
    rotary = LlamaRotaryEmbedding(transformers.LlamaConfig.from_dict(copy.deepcopy(raw)))
    assert rotary.attention_scaling == 1.0
    return rotary.inv_freq


def frequencies(config: ModelConfig) -> torch.Tensor:
    return inverse_frequencies(config.head_width, config.rope_theta, config.rope_scaling)


@pytest.mark.skipif(
    int(transformers.__version__.split(".")[0]) < 5, reason="transformers 5 reads both spellings"
)
def test_every_mixture_of_spellings_is_read_as_transformers_reads_it_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transformers.modeling_rope_utils.logger, "disabled", True)
    outcomes = {"read": 0, "refused": 0}
    for scaling, parameters, beside in product(ENTRIES, ENTRIES, BESIDE):
        raw = SIZES | {"rope_scaling": scaling, "rope_parameters": parameters} | beside
        try:
            config = ModelConfig.from_hf(raw)
        except InputError:
            outcomes["refused"] += 1
            assert (scaling or parameters or {}).get("rope_type") in ("yarn", "dynamic") or (
                0.5 in (*beside.values(), *(scaling or parameters or {}).values())
            ), raw
            continue
        outcomes["read"] += 1
        torch.testing.assert_close(
            frequencies(config), theirs(raw), rtol=1e-6, atol=0, msg=str(raw)
        )
        again = ModelConfig.from_hf(config.to_hf())
        assert torch.equal(frequencies(again), frequencies(config)), raw
    assert outcomes == {"read": 264, "refused": 312}


def test_yarn_is_refused_wherever_it_stands_and_what_is_not_read_is_no_matter() -> None:
    default = {"rope_type": "default", "rope_theta": 5e3}
    with pytest.raises(InputError, match=r"rope_scaling\.rope_type.*not supported.*'yarn'"):
        ModelConfig.from_hf(SIZES | {"rope_scaling": YARN, "rope_parameters": default})
    read = ModelConfig.from_hf(SIZES | {"rope_scaling": default, "rope_parameters": YARN})
    assert (read.rope_theta, read.rope_scaling) == (5e3, None)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rope_theta": None}, "rope_theta: must be a number"),
        ({"rope_parameters": {"rope_theta": None}}, "rope_theta: must be a number"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "from layer to layer"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "not supported"),
        ({"rope_scaling": "linear"}, "must be a JSON object"),
    ],
)
def test_what_cannot_be_meant_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        ModelConfig.from_hf(SIZES | changes)


@pytest.mark.parametrize("kind", ["qwen3", "lama", "mixtral", "qwen2_moe", "gemma", "Llama"])
def test_no_other_type_of_model_is_guessed(kind: str) -> None:
    with pytest.raises(InputError) as raised:
        ModelConfig.from_hf(SIZES | {"model_type": kind}, "config.json")
    assert "allowed: llama, mistral, qwen2" in str(raised.value)
    assert "mean" not in str(raised.value)
