"""Rows that models of transformers continue token by token, by a cache or by reading all anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from modicum.core.layers.meta import materialise
from modicum.models.transformers.config import TransformersConfig
from modicum.models.transformers.model import TransformersDecoder, build

_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
_SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, **_TOKENS,
}  # fmt: skip
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 48}
_HEADS = {**_GROUPED, "head_dim": 8}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SPACE = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}  # fmt: skip
_THREE = ["linear_attention", "full_attention", "linear_attention"]
LIMIT = 24  # of the first factors of LongRoPE, or of a model with dynamic scaling
_MODELS: dict[str, tuple[dict[str, Any], bool]] = {
    # States that modules keep themselves, and a cache of the model's own class.
    "recurrent_gemma": ({
        **_HEADS, "num_hidden_layers": 4, "lru_width": 32, "attention_window_size": 16,
        "block_types": ["recurrent", "recurrent", "attention"],
    }, False),
    "minimax": ({**_HEADS, **_EXPERTS, "block_size": 16}, False),
    "mamba": ({
        "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, **_TOKENS,
    }, False),
    "rwkv": ({
        "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32,
        **_TOKENS,
    }, False),
    # Its forward pass counts positions from 0 wherever none are given.
    "bamba": ({**_GROUPED, **_SPACE, "num_hidden_layers": 3, "attn_layer_indices": [1]}, True),
    "jamba": ({
        **_GROUPED, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
        "num_experts": 4, "num_experts_per_tok": 2, "use_mamba_kernels": False,
        "mamba_d_state": 8, "mamba_dt_rank": 4,
    }, True),
    "granitemoehybrid": ({
        **_GROUPED, **_SPACE, **_EXPERTS, "num_hidden_layers": 3, "layer_types": _THREE,
        "shared_intermediate_size": 48,
    }, True),
    "lfm2": ({
        **_GROUPED, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
    }, True),
    "llama4_text": ({
        **_HEADS, "num_hidden_layers": 4, "intermediate_size_mlp": 48, "attention_chunk_size": 8,
        "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2,
    }, True),
    "nemotron_h": ({
        **_HEADS, "num_hidden_layers": 4, "ssm_state_size": 8, "mamba_num_heads": 8,
        "mamba_head_dim": 8, "n_groups": 1, "chunk_size": 16,
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
    }, True),
    "falcon_h1": ({**_HEADS, **_SPACE, "mamba_d_ssm": 64}, True),
    "zamba": ({
        **_GROUPED, "num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 1,
        "use_mamba_kernels": False, "mamba_d_state": 8, "mamba_dt_rank": 4, "n_mamba_heads": 2,
        "attention_head_dim": 16,
    }, True),
    "qwen3_next": ({
        **_HEADS, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    }, True),
    "gpt_oss": ({**_HEADS, **_EXPERTS, "sliding_window": 6}, True),
    "gemma2": ({**_HEADS, "sliding_window": 6}, True),
}  # fmt: skip


def made(kind: str, fields: dict[str, Any]) -> TransformersDecoder:
    """A small decoder whose tokens look at some of those before them and not at others."""
    if kind not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    known = transformers.AutoConfig.for_model(kind, **fields)
    config = TransformersConfig.from_hf({**known.to_dict(), "model_type": kind})
    model = build(config)  # some hold buffers that no configuration says
    materialise(model, "cpu")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise / min(parameter.shape[-2:]) ** 0.5)
            else:
                parameter.copy_(1 + 0.1 * noise)
    return model.eval()  # type: ignore[no-any-return]


def continued(model: TransformersDecoder, ids: Tensor, prompt: int) -> Tensor:
    """The logits after a prompt and after each token that follows it."""
    states, found = model.new_states(len(ids)), []
    for part in (ids[:, :prompt], *ids[:, prompt:].split(1, 1)):
        logits, states = model.continued(part, states)
        found.append(logits)
    return torch.stack(found, 1)


@pytest.mark.parametrize("kind", _MODELS)
@torch.no_grad()
def test_a_row_that_is_continued_has_the_logits_that_it_has_anew(kind: str) -> None:
    fields, caches = _MODELS[kind]
    model = made(kind, fields)
    generator = torch.Generator().manual_seed(2)
    for prompt in (11, 1):  # the second row after another, whose states are not its own
        ids = torch.randint(0, 61, (2, 19), generator=generator)
        expected = model(ids)[:, prompt - 1 :]
        found = continued(model, ids, prompt)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    assert model.decoder_config.caches is caches


def long_rope(kind: str, **scaling: Any) -> TransformersDecoder:
    """A small decoder whose rotary positions change beyond `LIMIT` tokens."""
    rope = {"rope_theta": 10000.0, **scaling}
    fields = {**_GROUPED, "rope_parameters": rope}
    if scaling["rope_type"] == "longrope":
        fields["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    else:
        fields["max_position_embeddings"] = LIMIT
    return made(kind, fields)


LONG: dict[str, Any] = {
    "rope_type": "longrope", "long_factor": [4.0, 3.0, 2.5, 6.0],
    "short_factor": [1.0, 1.1, 1.2, 1.3], "original_max_position_embeddings": LIMIT,
}  # fmt: skip


@pytest.mark.parametrize("prompt", [1, 20, LIMIT, LIMIT + 1])
@torch.no_grad()
def test_a_row_that_grows_beyond_the_limit_of_long_rope_is_read_anew(prompt: int) -> None:
    model = long_rope("phi3", **LONG)
    assert model.decoder_config.caches
    lengths: list[int] = []
    model.get_input_embeddings().register_forward_hook(
        lambda module, given, out: lengths.append(given[0].shape[1])
    )
    ids = torch.randint(0, 61, (1, 30), generator=torch.Generator().manual_seed(2))
    found = continued(model, ids, prompt)
    before, after = [1] * (LIMIT - prompt), [1] * (29 - LIMIT)
    crossing = [LIMIT + 1] if prompt <= LIMIT else []
    assert lengths == [prompt, *before, *crossing, *after]
    anew = torch.stack([model(ids[:, :end])[:, -1] for end in range(prompt, 31)], 1)
    torch.testing.assert_close(found, anew, rtol=0, atol=1e-4 * float(anew.abs().max()))


@torch.no_grad()
def test_beyond_the_limit_it_writes_what_transformers_writes() -> None:
    model: Any = long_rope("phi3", **LONG)
    for seed in range(3):
        ids = torch.randint(0, 61, (1, 18), generator=torch.Generator().manual_seed(seed))
        states, given, found = model.new_states(1), ids, []
        for _ in range(16):
            logits, states = model.continued(given, states)
            given = logits.argmax(-1, keepdim=True)
            found.append(int(given))
        plain = type(model).plain_type(model.config).eval()
        plain.load_state_dict(model.state_dict())
        wanted = plain.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert found == wanted[0, 18:].tolist()


@torch.no_grad()
def test_beyond_the_limit_of_dynamic_scaling_each_token_is_read_with_all_before_it() -> None:
    model = long_rope("qwen2", rope_type="dynamic", factor=4.0)
    assert model.decoder_config.caches
    ids = torch.randint(0, 61, (1, 30), generator=torch.Generator().manual_seed(2))
    found = continued(model, ids, 20)
    model(ids[:, :4])  # until a row is as short again, frequencies stay those of the longest one
    anew = torch.stack([model(ids[:, :end])[:, -1] for end in range(20, 31)], 1)
    torch.testing.assert_close(found, anew, rtol=0, atol=1e-4 * float(anew.abs().max()))
