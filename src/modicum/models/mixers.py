"""Sequence mixers, by name: what moves information from earlier tokens to later ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.models.config import ModelConfig
from modicum.models.projections import projection
from modicum.models.rope import Sequence, rotate


class SequenceMixer(nn.Module, ABC):
    """A module that maps (x, state) to (y, state).

    `state` is what it remembers of earlier tokens; None while training, where rows start afresh.
    """

    @abstractmethod
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()

    @abstractmethod
    def new_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> Any:
        """An empty state with room for `capacity` tokens of `batch` rows."""

    @abstractmethod
    def forward(self, x: Tensor, state: Any, sequence: Sequence) -> tuple[Tensor, Any]:
        """Mix x [B, T, width], which follows the tokens in `state`."""


@dataclass(frozen=True)
class KeyValueState:
    """The keys and values [B, capacity, kv_heads, D] of the first `length` tokens.

    The buffers are written in place and shared with the states that follow from this one.
    """

    keys: Tensor
    values: Tensor
    length: int = 0

    def append(self, keys: Tensor, values: Tensor) -> KeyValueState:
        """The state after the tokens with these keys and values [B, T, kv_heads, D] as well.

        Raises:
            ValueError: there is no room for them.
        """
        end = self.length + keys.shape[1]
        if end > self.keys.shape[1]:
            raise ValueError(f"{end} tokens in a state that holds {self.keys.shape[1]}")
        self.keys[:, self.length : end] = keys
        self.values[:, self.length : end] = values
        return KeyValueState(self.keys, self.values, end)


class Attention(SequenceMixer):
    """Causal attention with rotary positions and grouped keys and values.

    Source: GQA, Ainslie et al., arXiv 2305.13245.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.heads, self.kv_heads = config.heads_of(layer), config.kv_heads_of(layer)
        self.head_width = config.head_width
        self.q_proj = projection(config, layer, "self_attn.q_proj")
        self.k_proj = projection(config, layer, "self_attn.k_proj")
        self.v_proj = projection(config, layer, "self_attn.v_proj")
        self.o_proj = projection(config, layer, "self_attn.o_proj")

    def new_state(
        self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype
    ) -> KeyValueState:
        """An empty state with room for `capacity` tokens of `batch` rows."""
        shape = (batch, capacity, self.kv_heads, self.head_width)
        # Not one like the other: without memory that loads 40 MB of torch, also for a plan.
        keys, values = (torch.empty(shape, device=device, dtype=dtype) for _ in range(2))
        return KeyValueState(keys, values)

    def forward(
        self, x: Tensor, state: KeyValueState | None, sequence: Sequence
    ) -> tuple[Tensor, KeyValueState | None]:
        """Mix x [B, T, width], which follows the tokens in `state`."""
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, self.head_width)
        k = self.k_proj(x).view(batch, length, self.kv_heads, self.head_width)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head_width)
        q, k = rotate(q, sequence), rotate(k, sequence)
        if state is not None:
            state = state.append(k, v)
            k, v = state.keys[:, : state.length], state.values[:, : state.length]
        y = self._attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), sequence.mask)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1)), state

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        grouped = self.heads != self.kv_heads
        if mask is not None and grouped and q.is_cuda:
            # The fused CUDA kernels that take a mask do not take groups.
            k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)
            v = v.repeat_interleave(self.heads // self.kv_heads, dim=1)
            grouped = False
        causal = mask is None and q.shape[2] > 1
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped
        )


MIXERS: dict[str, type[SequenceMixer]] = {"attention": Attention}
