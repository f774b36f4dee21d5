from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config

from modicum.core.errors import InputError
from modicum.models import Llama, ModelConfig

SIZES = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def raw(**changes: object) -> dict[str, object]:
    return LlamaConfig(**SIZES).to_dict() | changes


def test_defaults_follow_from_width_and_heads() -> None:
    config = ModelConfig(vocabulary_size=10, width=100, layers=1, heads=5)
    assert (config.kv_heads, config.head_width, config.mlp_width) == (5, 20, 288)


@pytest.mark.parametrize("kind", [LlamaConfig, MistralConfig, Qwen2Config])
def test_a_config_survives_the_way_through_transformers(kind: type) -> None:
    theirs = kind(**SIZES, sliding_window=None) if kind is MistralConfig else kind(**SIZES)
    ours = ModelConfig.from_hf(theirs.to_dict())
    again = ModelConfig.from_hf(kind.from_dict(ours.to_hf()).to_dict())
    assert again == ours
    assert ours.attention_bias == (kind is Qwen2Config)
    assert (ours.width, ours.heads, ours.kv_heads, ours.mlp_width) == (24, 6, 2, 40)


def test_what_it_does_not_know_is_kept_for_the_save() -> None:
    config = ModelConfig.from_hf(raw(my_own_entry=[1, 2], eos_token_id=[5, 6]))
    assert config.eos_token_id == (5, 6)
    assert config.to_hf()["my_own_entry"] == [1, 2]
    assert config.to_hf()["eos_token_id"] == [5, 6]


@pytest.mark.parametrize(
    ("spelling", "theta", "scaling"),
    [
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 1e4, ("linear", 2.0)),
        ({"rope_theta": 3e4, "rope_scaling": LLAMA3}, 3e4, ("llama3", 8.0)),
        ({"rope_parameters": {**LLAMA3, "rope_theta": 2e4}}, 2e4, ("llama3", 8.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, 7.0, None),
    ],
)
def test_both_spellings_of_rotary_positions(
    spelling: dict[str, object], theta: float, scaling: tuple[str, float] | None
) -> None:
    entry = raw() | {"rope_parameters": None} | spelling
    config = ModelConfig.from_hf(entry)
    assert config.rope_theta == theta
    found = config.rope_scaling and (
        config.rope_scaling["rope_type"],
        config.rope_scaling["factor"],
    )
    assert found == scaling
    theirs = LlamaConfig.from_dict(config.to_hf())
    kind = scaling[0] if scaling else "default"
    if hasattr(theirs, "rope_parameters"):  # of transformers 5
        assert theirs.rope_parameters["rope_theta"] == theta
        assert theirs.rope_parameters["rope_type"] == kind
    else:
        assert theirs.rope_theta == theta
        assert (theirs.rope_scaling or {"rope_type": "default"})["rope_type"] == kind


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"model_type": "lama"}, "model_type", "allowed: llama, mistral, qwen2"),
        ({"model_type": None}, "model_type", "not supported"),
        ({"hidden_act": "gelu"}, "hidden_act", "allowed: silu"),
        ({"num_key_value_heads": 4}, "num_key_value_heads", "multiple"),
        ({"num_attention_heads": 5}, "num_attention_heads", "multiple"),
        ({"head_dim": 3}, "head_dim", "even"),
        ({"hidden_size": "24"}, "hidden_size", "type int"),
        ({"num_hidden_layers": True}, "num_hidden_layers", "type int"),
        ({"num_hidden_layers": 0}, "num_hidden_layers", "at least 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers", "at most 10000"),
        ({"vocab_size": None}, "vocab_size", "missing"),
        ({"quantization_config": {"bits": 4}}, "quantization_config", "full-precision"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type", "llama3"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor", "number"),
        ({"rope_parameters": [1]}, "rope_parameters", "object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "allowed: 1.0"),
        ({"model_type": "mistral", "sliding_window": 16}, "sliding_window", "window"),
        ({"model_type": "mistral", "max_position_embeddings": 8192}, "sliding_window", "4096"),
        ({"model_type": "mistral", "sliding_window": "16"}, "sliding_window", "type int"),
        (
            {"model_type": "mistral", "sliding_window": 16, "use_sliding_window": False},
            "sliding_window",
            "window",
        ),
        (
            {"model_type": "mistral", "sliding_window": 16, "max_position_embeddings": None},
            "max_position_embeddings",
            "missing",
        ),
        (
            {"model_type": "qwen2", "max_position_embeddings": 8192, "use_sliding_window": True},
            "sliding_window",
            "4096",
        ),
        ({"is_causal": False}, "is_causal", "later tokens"),
        ({"attention_dropout": 0.1}, "attention_dropout", "allowed: 0"),
    ],
)
def test_a_mistake_is_named_as_the_file_spells_it(
    changes: dict[str, object], field: str, words: str
) -> None:
    with pytest.raises(InputError) as caught:
        ModelConfig.from_hf(raw(**changes), "some/config.json")
    assert caught.value.field == field
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"some/config.json: {field}: ")


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen2", "sliding_window": 16},
        {"model_type": "mistral", "sliding_window": None, "max_position_embeddings": 8192},
        {"model_type": "forms_llama", "forms": {}, "sliding_window": 16},
    ],
)
def test_a_window_that_transformers_does_not_look_at_is_none(changes: dict[str, object]) -> None:
    made = ModelConfig.from_hf(raw(**changes))
    assert made.context == changes.get("max_position_embeddings", 64)


def test_a_new_mistral_is_saved_without_a_window() -> None:
    new = ModelConfig(*(11, 16, 1, 4), context=8192, model_type="mistral")
    assert MistralConfig.from_dict(new.to_hf()).sliding_window is None
    assert ModelConfig.from_hf(new.to_hf()) == new


@pytest.mark.parametrize("changes", [{"mixer": "atention"}, {"mlp": "swigl"}])
def test_unknown_parts_are_refused_with_the_nearest(changes: dict[str, str]) -> None:
    config = ModelConfig(vocabulary_size=5, width=8, layers=1, heads=2, **changes)
    with torch.device("meta"), pytest.raises(InputError, match="Did you mean"):
        Llama(config)


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
@pytest.mark.parametrize("flag", [True, False])
def test_shapes_are_those_of_the_model(model_type: str, flag: bool) -> None:
    config = ModelConfig(
        *(11, 16, 2, 4),
        kv_heads=2,
        model_type=model_type,
        tied_embeddings=flag,
        attention_bias=flag,
        mlp_bias=flag,
    )
    with torch.device("meta"):
        model = Llama(config)
    assert config.parameter_shapes() == {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert config.parameter_count() == sum(p.numel() for p in model.parameters())


def test_configurations_and_headers_need_no_torch() -> None:
    code = "import sys; from modicum.models import ModelConfig, read_header; "
    code += "print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
