"""The channel mixers of a block, by name."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from modicum.models.config import ModelConfig
from modicum.models.projections import projection


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)).

    Source: GLU Variants Improve Transformer, Shazeer, arXiv 2002.05202.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.gate_proj = projection(config, layer, "mlp.gate_proj")
        self.up_proj = projection(config, layer, "mlp.up_proj")
        self.down_proj = projection(config, layer, "mlp.down_proj")

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., width] to the same shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


MLPS: dict[str, type[nn.Module]] = {"swiglu": SwiGLU}
