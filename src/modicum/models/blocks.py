"""The blocks of the decoder: a mixer and an MLP that read the residual stream and add to it.

Where branches leave others out, several streams run from block to block: `core.layers.wiring`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.layers.wiring import BlockWires, Wires
from modicum.models.config import ModelConfig
from modicum.models.mixers import MIXERS
from modicum.models.mlps import MLPS
from modicum.models.rope import Sequence

Chosen = TypeVar("Chosen")
StreamTensors = Tensor | tuple[Tensor, ...]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight, the mean in float32.

    Source: Zhang and Sennrich, arXiv 1910.07467.
    """

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., width]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


class Block(nn.Module):
    """One layer: x + mixer(norm(x)), then x + mlp(norm(x)).

    Attributes:
        wires: None, or how several streams run through it where branches leave others out.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.wires = config.wires()[layer]
        self.input_layernorm = RMSNorm(config.width, config.norm_epsilon)
        self.self_attn = _chosen(MIXERS, "mixer", config.mixer)(config, layer)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_epsilon)
        self.mlp = _chosen(MLPS, "mlp", config.mlp)(config, layer)

    def forward(
        self, x: StreamTensors, state: Any, sequence: Sequence
    ) -> tuple[StreamTensors, Any]:
        """Map x [B, T, width], or several such streams, and the mixer's state to the next ones."""
        if self.wires is not None:
            return self._wired(x, state, sequence, self.wires)
        assert isinstance(x, Tensor)
        mixed, state = self.self_attn(self.input_layernorm(x), state, sequence)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), state

    def widths(self) -> dict[str, int | None]:
        """The widths that its layers have, by field of `BlockPlan`; None: they have none such."""
        heads = {name: getattr(self.self_attn, name, None) for name in ("heads", "kv_heads")}
        down = getattr(self.mlp, "down_proj", None)
        return {**heads, "mlp_width": getattr(down, "in_features", None)}

    def _wired(
        self, x: StreamTensors, state: Any, sequence: Sequence, wires: BlockWires
    ) -> tuple[StreamTensors, Any]:
        streams = (x,) if isinstance(x, Tensor) else x
        mixed, state = self.self_attn(self.input_layernorm(streams[0]), state, sequence)
        streams = _passed(streams, mixed, wires.mixer)
        streams = _passed(streams, self.mlp(self.post_attention_layernorm(streams[0])), wires.mlp)
        return streams if len(streams) > 1 else streams[0], state


def _passed(streams: tuple[Tensor, ...], added: Tensor, wires: Wires) -> tuple[Tensor, ...]:
    """The streams behind a branch that adds to some of those before it."""
    return tuple(streams[place] + added if adds else streams[place] for place, adds in wires)


def _chosen(registry: Mapping[str, Chosen], field: str, name: str) -> Chosen:
    if name not in registry:
        raise InputError(
            f"no {field} has this name",
            field=field,
            value=name,
            allowed=", ".join(sorted(registry)),
            candidates=registry,
        )
    return registry[name]
