"""Rotary positions and who may attend to whom: what all layers of one forward pass share.

Source: RoFormer, Su et al., arXiv 2104.09864; frequencies for long contexts as in Llama 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modicum.models.config import ModelConfig


@dataclass(frozen=True)
class Sequence:
    """What a sequence mixer knows of the tokens it mixes.

    Args:
        cosine, sine: [T, 1, D] or, where rows differ, [B, T, 1, D]; the sine's first half is
            negated, as `rotate` wants it.
        mask: additive, [B or 1, 1, T, S], or None for plain causal attention.
    """

    cosine: Tensor
    sine: Tensor
    mask: Tensor | None


def unscaled_frequencies(head_width: int, theta: float) -> Tensor:
    """Radians a position for each pair of channels, float32 [head_width / 2], on the CPU."""
    # On the CPU whatever the default device: a power that differs in its last bit on another
    # device is an angle that differs visibly at position 10,000.
    exponent = torch.arange(0, head_width, 2, dtype=torch.float32, device="cpu")
    return 1.0 / theta ** (exponent / head_width)


def inverse_frequencies(
    head_width: int, theta: float, scaling: Mapping[str, Any] | None = None
) -> Tensor:
    """The same under a scaling, as `ModelConfig.rope_scaling` has it."""
    frequency = unscaled_frequencies(head_width, theta)
    if scaling is None:
        return frequency
    if scaling["rope_type"] == "linear":
        return frequency / scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / (2 * math.pi / frequency)
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequency / scaling["factor"] + blend * frequency


def rotation(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine for `positions` of any shape [...]: two tensors [..., 1, D].

    Computed anew each time, for less than a thousandth of a step, so that there is no table that
    a meta or fake device could spoil.
    """
    scaled = inverse_frequencies(config.head_width, config.rope_theta, config.rope_scaling)
    frequency = scaled.to(positions.device)
    angle = positions.unsqueeze(-1).float() * frequency
    cosine, sine = angle.cos().to(dtype), angle.sin().to(dtype)
    cosine = torch.cat((cosine, cosine), dim=-1).unsqueeze(-2)
    return cosine, torch.cat((-sine, sine), dim=-1).unsqueeze(-2)


def rotate(x: Tensor, sequence: Sequence) -> Tensor:
    """Turn the pairs (i, i + D/2) of the heads x [B, T, H, D] by their positions' angles."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * sequence.cosine, swapped, sequence.sine)


def document_positions(documents: Tensor) -> Tensor:
    """Positions that restart at 0 where the document's number changes: [B, T] to int64 [B, T]."""
    place = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = torch.zeros_like(place)
    starts[:, 1:] = place[:, 1:] * (documents[:, 1:] != documents[:, :-1])
    return place - starts.cummax(dim=1).values


def document_mask(documents: Tensor, dtype: torch.dtype) -> Tensor:
    """The additive mask [B, 1, T, T] that is causal and never leaves a document [B, T]."""
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    allowed = (documents[:, :, None] == documents[:, None, :]) & causal
    mask = torch.zeros(allowed.shape, dtype=dtype, device=documents.device)
    return mask.masked_fill_(~allowed, -math.inf).unsqueeze(1)


def continuation_mask(length: int, past: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """The additive mask [1, 1, length, past + length] of tokens that follow `past` cached ones."""
    blocked = torch.ones(length, past + length, dtype=torch.bool, device=like.device)
    mask = torch.zeros(blocked.shape, dtype=dtype, device=like.device)
    return mask.masked_fill_(blocked.triu(past + 1), -math.inf)[None, None]


def describe(
    config: ModelConfig, input_ids: Tensor, documents: Tensor | None, past: int, dtype: torch.dtype
) -> Sequence:
    """What the mixers need to know about `input_ids` [B, T] after `past` cached tokens."""
    length = input_ids.shape[1]
    mask = None
    if documents is not None:
        positions = document_positions(documents)
        mask = document_mask(documents, dtype)
    else:
        positions = torch.arange(past, past + length, device=input_ids.device)
        if past and length > 1:
            mask = continuation_mask(length, past, input_ids, dtype)
    return Sequence(*rotation(config, positions, dtype), mask)
