"""The linear layers of the decoder's blocks, each in the form that the plan of forms gives it."""

from __future__ import annotations

from torch import nn

from modicum.core.layers.linear_forms import make_linear
from modicum.models.config import ModelConfig


def projection(config: ModelConfig, layer: int, name: str) -> nn.Module:
    """The layer of this name (`mlp.up_proj`) in the block of this number, without numbers."""
    rows, columns, bias = config.projections(layer)[name]
    form = config.forms.of(config.block_prefixes()[layer] + name)
    return make_linear(form, columns, rows, bias)
