"""The channel mixers of a block, by name."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from modicum.linears import make_linear
from modicum.models.config import ModelConfig


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)).

    Source: GLU Variants Improve Transformer, Shazeer, arXiv 2002.05202.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        form, bias = config.linear, config.mlp_bias
        self.gate_proj = make_linear(form, config.width, config.mlp_width, bias)
        self.up_proj = make_linear(form, config.width, config.mlp_width, bias)
        self.down_proj = make_linear(form, config.mlp_width, config.width, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., width] to the same shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


MLPS: dict[str, type[nn.Module]] = {"swiglu": SwiGLU}
