"""Blocks of transformers that run again in the backward pass."""

from __future__ import annotations

import torch

from modicum.core.layers.meta import materialise, on_meta
from modicum.models.transformers.config import TransformersConfig
from modicum.models.transformers.model import TransformersDecoder, build

IDS = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(3))
# Its forward pass takes no `use_cache`, and makes a cache unless config.json forbids it.
CACHING = {
    "model_type": "granitemoe", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2,
    "initializer_range": 0.3,
}  # fmt: skip


def test_blocks_that_run_again_in_eval_mode_write_into_no_cache() -> None:
    with on_meta():
        model: TransformersDecoder = build(TransformersConfig(CACHING))
    materialise(model, "cpu")
    model.initialise(0)
    model.eval().requires_grad_(False)
    weight = model.blocks[0].get_parameter("self_attn.q_proj.weight").requires_grad_()
    found = []
    for again in (False, True):
        model.recompute = again
        logits = model(IDS)
        found.append([logits.detach(), *torch.autograd.grad(logits.square().sum(), weight)])
    assert found[0][1].any()
    torch.testing.assert_close(found[1], found[0])
