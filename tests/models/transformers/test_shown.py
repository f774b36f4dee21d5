"""What small models of an architecture show of it."""

from __future__ import annotations

import pytest
import transformers

from modicum.models.transformers.shown import shown

_SIZES = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4,
    "num_experts_per_tok": 2, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "fields", "packing"),
    [
        # Linear attention carries a state over documents; its decays are buffers that files hold.
        ("MiniMaxConfig", {}, "none"),
        # The temperature of attention grows with the place in the row.
        ("Llama4TextConfig", {"attn_temperature_tuning": True}, "none"),
        ("MixtralConfig", {}, "positions"),
    ],
)
def test_packing_is_what_small_models_show(kind, fields, packing):
    made = getattr(transformers, kind, None)
    if made is None:
        pytest.skip(f"this transformers has no {kind}")
    found = shown(made(**_SIZES, **fields).to_dict())
    assert (found.packing, found.refused) == (packing, None)


@pytest.mark.parametrize("kind", ["granitemoe_swa", "hrm_text"])
def test_rounding_is_not_taken_for_a_look_at_later_tokens(kind):
    assert shown(transformers.AutoConfig.for_model(kind).to_dict()).refused is None


@pytest.mark.parametrize("kind", ["bert-generation", "xlnet"])
def test_what_looks_at_later_tokens_is_refused(kind):
    assert (
        "depend on later tokens" in shown(transformers.AutoConfig.for_model(kind).to_dict()).refused
    )
