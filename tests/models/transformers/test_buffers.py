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
from modicum.models.transformers.model import TransformersDecoder, build

ROUTED: dict[str, Any] = {
    "model_type": "dots1", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "intermediate_size": 48, "moe_intermediate_size": 16, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
}  # fmt: skip
BIAS = torch.tensor([1.001, 1.002, 1.003, 1.004])  # which are all 1 in bf16


def bias(tensors: dict[str, Tensor]) -> Tensor:
    """The routing bias of the one layer of experts."""
    [found] = (each for name, each in tensors.items() if name.endswith("e_score_correction_bias"))
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with on_meta(torch.bfloat16):
        model: TransformersDecoder = build(TransformersConfig(ROUTED))
    materialise(model, "cpu")
    model.initialise(0)
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
