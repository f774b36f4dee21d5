"""What a config.json says, read as transformers reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from modicum.models import load
from modicum.models.transformers.kinds import described

MAMBA2: dict[str, Any] = {
    "model_type": "mamba2", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
    "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2, "chunk_size": 16,
}  # fmt: skip
FALCON_H1: dict[str, Any] = {
    "model_type": "falcon_h1", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48,
    "max_position_embeddings": 64, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8,
    "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16,
    "ssm_multipliers": [0.5, 2.0, 0.3, 0.7, 1.5],
}  # fmt: skip


@pytest.mark.parametrize("limit", [{"__float__": "Infinity"}, float("inf")])
def test_floats_that_json_has_no_words_for(limit: Any) -> None:
    known = described(MAMBA2 | {"time_step_limit": [0.0, limit]})
    assert list(known.time_step_limit) == [0.0, float("inf")]
    assert described({"model_type": "mamba2"}).time_step_limit[1] == float("inf")


@pytest.mark.parametrize("raw", [MAMBA2, FALCON_H1], ids=["mamba2", "falcon_h1"])
def test_a_folder_that_has_them_computes_what_transformers_does(
    raw: dict[str, Any], tmp_path: Path
) -> None:
    config = transformers.AutoConfig.for_model(**raw)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert "__float__" in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    ours, ids = load(tmp_path).eval(), torch.arange(3, 43).reshape(2, 20)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=0, atol=1e-6)
