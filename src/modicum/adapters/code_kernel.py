"""A sparse change of high rank that small codes of a layer's inputs and outputs make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modicum.adapters.base_weights import at_least_fp32
from modicum.adapters.built_changes import BuiltRule, Gradients
from modicum.core.layers.largest import below_largest

_HEAD_WEIGHT = 0.1  # of a head's distances; every second head's are subtracted
_SMALLEST = 1e-30  # the square of a distance that has a direction, and so a gradient


@dataclass(frozen=True)
class KernelRule(BuiltRule):
    """D of P [in, r], Q [out, r], how many entries are kept, and a, g and b where they are."""

    heads: int
    by_size: bool

    def built(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        kernel = self._kernel(tensors)[0]
        limit = below_largest(kernel.detach().abs(), tensors[2])
        return kernel * self._gain(kernel, limit), limit

    def again(self, tensors: Sequence[Tensor], known: Tensor) -> tuple[Tensor, Any]:
        kernel, *parts = self._kernel(tensors)
        gain = self._gain(kernel, known)
        return kernel.mul_(gain), (gain, *parts)

    def gradients(self, tensors: Sequence[Tensor], made: Any, of_change: Tensor) -> Gradients:
        gain, distances, merged, soft = made
        of_kernel = of_change.to(gain.dtype).mul_(gain)
        of_bend: Gradients = ()
        if soft is not None:
            a, g, _ = (at_least_fp32(each) for each in tensors[3:])
            met = of_kernel * soft
            through = a * (met - soft * met.sum(0))
            of_bend = (
                met.sum()[None],
                -(through * merged).sum() / g.square(),
                of_kernel.sum()[None],
            )
            of_kernel = of_kernel + through / g
        of_p, of_q = [], []
        for (p, q), (weight, distance) in zip(self._codes(tensors), distances, strict=True):
            there = distance.square() > 2 * _SMALLEST
            pull = torch.where(there, weight * of_kernel / distance, 0.0)
            of_p.append(pull.sum(0)[:, None] * p - pull.T @ q)
            of_q.append(pull.sum(1)[:, None] * q - pull @ p)
        return torch.cat(of_p, 1), torch.cat(of_q, 1), None, *of_bend

    def _codes(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        p, q = (at_least_fp32(each).chunk(self.heads, 1) for each in tensors[:2])
        return list(zip(p, q, strict=True))

    def _kernel(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Any, Tensor, Tensor | None]:
        """K [out, in]; each head's weight and distances; K without the term, and its softmax."""
        distances, merged = [], torch.zeros((), device=tensors[0].device)
        for head, (p, q) in enumerate(self._codes(tensors)):
            squares = p.square().sum(1) + q.square().sum(1)[:, None]
            distance = torch.addmm(squares, q, p.T, alpha=-2).clamp_min(_SMALLEST).sqrt()
            weight = _HEAD_WEIGHT * (-1) ** head
            distances.append((weight, distance))
            merged = merged + weight * distance
        if len(tensors) == 3:
            return merged, distances, merged, None
        a, g, b = (at_least_fp32(each) for each in tensors[3:])
        soft = (merged / g).softmax(0)
        return merged + a * soft + b, distances, merged, soft

    def _gain(self, kernel: Tensor, limit: Tensor) -> Tensor:
        """What entries of K are multiplied with: 0 of those that are not kept."""
        sizes = kernel.detach().abs()
        there = (sizes > limit).to(sizes.dtype)
        return sizes.mul_(there) if self.by_size else there
