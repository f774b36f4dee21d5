from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from modicum.core.layers.meta import materialise, on_meta
from modicum.models import load, read_header, save
from modicum.models.transformers.config import TransformersConfig
from modicum.models.transformers.held import held_by_transformers
from modicum.models.transformers.model import TransformersDecoder, build
from modicum.models.transformers.saving import groups

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "intermediate_size": 48,
    "moe_intermediate_size": 16,
}  # fmt: skip
ROUTED: dict[str, Any] = {
    "model_type": "dots1", "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, **SIZES,
}  # fmt: skip
ERNIE: dict[str, Any] = {
    "model_type": "ernie4_5_moe", "moe_num_experts": 4, "moe_num_shared_experts": 1, "moe_k": 2,
    **SIZES,
}  # fmt: skip
FLINT: dict[str, Any] = {
    "model_type": "flint", "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8,
    "shared_expert_intermediate_size": 16, "mlp_only_layers": [0], **SIZES,
}  # fmt: skip
BIAS = torch.tensor([1.001, 1.002, 1.003, 1.004])  # which are all 1 in bf16
EXACT = ("gate.weight", "moe_statics.e_score_correction_bias", "sinks")


def begun(raw: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> TransformersDecoder:
    """A new model in this dtype; what is to be exact has numbers that bf16 would round."""
    with on_meta(dtype):
        model: TransformersDecoder = build(TransformersConfig(raw))
    materialise(model, "cpu")
    model.initialise(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(EXACT):
                numbers = 1 + torch.arange(1, parameter.numel() + 1) / 1000
                parameter.copy_(numbers.view_as(parameter))
    return model


def bias(tensors: dict[str, Tensor]) -> Tensor:
    """The routing bias of the one layer of experts."""
    [found] = (each for name, each in tensors.items() if name.endswith("e_score_correction_bias"))
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = begun(ROUTED)
    with torch.no_grad():
        bias(dict(model.named_buffers())).copy_(BIAS)
    return save(model, tmp_path / "model")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_biases_of_routing_stay_in_fp32_in_a_model_of_bf16(
    folder: Path, dtype: torch.dtype | None
) -> None:
    assert read_header(folder).dtypes == {"BF16"}
    model = load(folder, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    found = bias(dict(model.named_buffers()))
    assert found.dtype == torch.float32
    assert torch.equal(found, BIAS)


def test_biases_of_routing_are_exported_unrounded(folder: Path, tmp_path: Path) -> None:
    made = save(load(folder, dtype=torch.float32), tmp_path / "rounded", dtype=torch.bfloat16)
    assert torch.equal(bias(load_file(made / "model.safetensors")), BIAS)
    assert read_header(made).dtypes == {"BF16"}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("raw", [ERNIE, FLINT], ids=["ernie", "flint"])
def test_parameters_that_transformers_keeps_in_fp32_are_so_in_a_model_of_bf16(
    raw: dict[str, Any], dtype: torch.dtype | None, tmp_path: Path
) -> None:
    expected = dict(begun(raw, torch.float32).named_parameters())
    assert sum(name.endswith(EXACT) for name in expected) >= 2
    folder = save(begun(raw), tmp_path / "model")
    header = read_header(folder)
    assert (header.dtypes, header.dtype) == ({"BF16"}, "BF16")
    for name, parameter in load(folder, dtype=dtype).named_parameters():
        exact = name.endswith(EXACT)
        assert parameter.dtype == (torch.float32 if exact else torch.bfloat16), name
        assert not exact or torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize("raw", [ERNIE, FLINT], ids=["ernie", "flint"])
def test_such_parameters_are_exported_unrounded(raw: dict[str, Any], tmp_path: Path) -> None:
    made = save(begun(raw, torch.float32), tmp_path / "rounded", dtype=torch.bfloat16)
    stored = load_file(made / "model.safetensors")
    wide = {name for name, tensor in stored.items() if tensor.dtype == torch.float32}
    routing = {name for name in stored if name.endswith(("gate.weight", "correction_bias"))}
    assert wide >= routing > set()
    assert read_header(made).dtypes == {"BF16"}
    size = sum(tensor.nbytes for tensor in stored.values())
    assert sum(group.bytes for group in groups(begun(raw))) == size


@pytest.mark.parametrize("raw", [ERNIE, FLINT], ids=["ernie", "flint"])
def test_a_forecast_counts_such_parameters_as_they_are_held(raw: dict[str, Any]) -> None:
    held = held_by_transformers(TransformersConfig(raw), 2)
    for name, parameter in begun(raw).named_parameters():
        assert sum(rows * size for rows, size in held[name]) == parameter.nbytes, name
