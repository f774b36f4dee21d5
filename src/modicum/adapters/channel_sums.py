"""Maps that make a layer's channels fewer before a thin product, and more after it.

A low-rank update whose A reads sums of channels, or whose B writes numbers that several channels
get, has thinner factors at the same rank. Both maps are this one and its transpose.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from modicum.core.torch_private import version_of

# Up to so many parts are added one by one, several times faster than a sum over a short axis.
_FEW = 8


@dataclass(frozen=True)
class ChannelSums:
    """The linear map S from n channels to n / parts: each is the sum of `parts` channels.

    Args:
        parts: how many; it divides n.
        adjacent: sums are of neighbours, j parts to (j + 1) parts - 1; else of channels that have
            one place in `parts` segments of n / parts channels: j, j + n / parts, and so on.

    >>> ChannelSums(2).sums(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor([3., 7.])
    >>> ChannelSums(2, adjacent=False).sums(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor([4., 6.])
    >>> ChannelSums(2).copies(torch.tensor([3.0, 7.0]))
    tensor([3., 3., 7., 7.])
    """

    parts: int
    adjacent: bool = True

    def sums(self, x: Tensor) -> Tensor:
        """S x: [..., n] to [..., n / parts], in the dtype of x."""
        grouped = self._grouped(x)
        if self.parts > 2 and x.dtype.itemsize < 4:  # a sum rounds once, as two that are added do
            return grouped.sum(self._axis, dtype=x.dtype)
        if self.parts > _FEW:
            return grouped.sum(self._axis)
        first, *others = grouped.unbind(self._axis)
        return sum(others, first)

    def copies(self, thin: Tensor) -> Tensor:
        """S^T x: [..., n / parts] to [..., n]."""
        if self.adjacent:
            return thin.repeat_interleave(self.parts, -1)
        return thin.repeat(*(1,) * (thin.ndim - 1), self.parts)

    def add_copies(self, x: Tensor, thin: Tensor, scale: float = 1.0) -> Tensor:
        """x + scale S^T thin, in place: the copies are never made. x is contiguous."""
        grouped = self._grouped(x)
        if self.parts > _FEW:
            grouped.add_(thin.unsqueeze(self._axis), alpha=scale)
            return x
        for each in range(self.parts):
            grouped.select(self._axis, each).add_(thin, alpha=scale)
        return x

    def _grouped(self, x: Tensor) -> Tensor:
        width = x.shape[-1] // self.parts
        return x.unflatten(-1, (width, self.parts) if self.adjacent else (self.parts, width))

    @property
    def _axis(self) -> int:
        return -1 if self.adjacent else -2

    def once(self, x: Tensor) -> Tensor:
        """S x, the very tensor that the last layer got which read the same x, if it still lives.

        So layers that read one tensor, as q, k and v do, keep its sums once, as they would keep x.
        """
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or x.is_inference():
            return self.sums(x)  # nothing is kept, or the compiler sees that it is the same
        if (latest := _latest.get(self)) is not None:
            of, version, found = latest[0](), latest[1], latest[2]()
            same = of is x and version == version_of(x)
            if same and found is not None and found.requires_grad == x.requires_grad:
                return found
        made = self.sums(x)
        _latest[self] = TensorWeakRef(x), version_of(x), TensorWeakRef(made)
        return made


# What each map was last applied to; neither tensor is kept alive.
_latest: dict[ChannelSums, tuple[TensorWeakRef, int, TensorWeakRef]] = {}
