"""Ranks that do the same end alike to the bit, though decompositions may differ between hosts.

Each makes a digest of what must be alike, and only those travel where it is. Else the first rank's
values go to all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from modicum.core.ranks.observed_calls import AGREEMENT, naming
from modicum.core.ranks.ranks import peer_errors

# What ranks must have alike before the next step, by their process group.
Late = dict[Any, list[Tensor]]
# Elements that are mixed at a time: three tensors of int64 are as long.
_CHUNK = 1 << 16
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd numbers for products modulo 2^64, those of SplitMix64 as they are with a sign.
_ODD, _MIX = 0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64)


def first_ones(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> bool:
    """Take the first rank's values, in place, of the tensors that are not alike on all ranks.

    One call carries 16 bytes of each tensor, as an agreement that no ledger has. All ranks of the
    group give as many tensors, of the same shapes and dtypes; for none there is no call.

    Returns:
        Whether any were not alike: the same on all ranks.
    """
    if not tensors:
        return False
    own = digests(tensors)
    most = torch.cat([own, ~own])
    with peer_errors():
        with naming(AGREEMENT):
            dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        largest, smallest = most[: len(own)], ~most[len(own) :]
        others = (largest != smallest).tolist()
        with naming("bases"):
            for tensor, other in zip(tensors, others, strict=True):
                if other:
                    dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)
    return any(others)


def digests(tensors: Sequence[Tensor]) -> Tensor:
    """A number for the bits of each tensor, int64 [tensors]: of the same bits anywhere the same.

    It is exact integer arithmetic, so it does not hang on the order of the sums.

    >>> digests([torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])]).unique().numel()
    2
    """
    longest = min(_CHUNK, max(tensor.numel() for tensor in tensors))
    weights = torch.arange(1, longest + 1, device=tensors[0].device).mul_(_ODD)
    weights.bitwise_xor_(weights >> 30).mul_(_MIX).bitwise_or_(1)
    return torch.stack([_digest(tensor, weights) for tensor in tensors])


def _digest(tensor: Tensor, weights: Tensor) -> Tensor:
    found = weights.new_zeros(())
    for words in tensor.reshape(-1).view(_WORDS[tensor.element_size()]).split(_CHUNK):
        mixed = words * weights[: len(words)]
        mixed.bitwise_xor_(mixed >> 32)  # a sign is a number's highest bit: let it reach all others
        found.mul_(_ODD).add_(mixed.sum())
    return found
