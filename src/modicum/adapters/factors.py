"""The tensors of an adapter: what each is like at first, and those that many layers share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from modicum.adapters.sites import Site
from modicum.core.random import normal_, uniform_
from modicum.core.ranks.sharding import elements_before, own_part

if TYPE_CHECKING:
    from modicum.adapters.base import Adapter


@dataclass(frozen=True)
class Factor:
    """A tensor of an adapter, and how it starts.

    `bound` b starts it as U(-b, b), `std` s as N(0, s^2); neither, as zeros.
    """

    shape: tuple[int, ...]
    bound: float = 0.0
    std: float = 0.0
    dtype: torch.dtype = torch.float32

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes, of the full tensor."""
        return self.numel * self.dtype.itemsize

    def empty(self, device: torch.device | str | None) -> Tensor:
        """Memory for it."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def at_least(self, dtype: torch.dtype) -> Factor:
        """The same with that precision, if it is a number of less."""
        if not self.dtype.is_floating_point:
            return self
        return replace(self, dtype=torch.promote_types(self.dtype, dtype))

    def fill(self, tensor: Tensor, *, seed: int, name: str) -> None:
        """Start `tensor` in place, as a function of (seed, name) alone; a rank, its part of it."""
        before = elements_before(tensor)
        with torch.no_grad():
            part, _ = own_part(tensor)
            if self.bound:
                uniform_(part, -self.bound, self.bound, seed=seed, name=name, offset=before)
            elif self.std:
                normal_(part, std=self.std, seed=seed, name=name, offset=before)
            else:
                part.zero_()


class SharedFactors(nn.Module):
    """The trained tensors of an adapter that many sites use, owned once, by the model itself.

    So optimizers, clipping, checkpoints and gradient buckets see each once, and FSDP2's root group
    keeps it gathered from the first block's forward to the last one's backward. Layers read them
    here at each forward pass, as FSDP2 puts other tensors in their place.
    """

    def __init__(
        self, method: Adapter, sites: Sequence[Site], device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.method, self.sites = method, tuple(sites)
        for name, factor in method.shared(sites).items():
            made = factor.at_least(_widest(sites)).empty(device)
            self.register_parameter(name, nn.Parameter(made))

    def initialise(self, *, seed: int) -> None:
        """Start every tensor; the same seed gives the same values anywhere."""
        for key, factor in self.method.shared(self.sites).items():
            factor.fill(self.get_parameter(key), seed=seed, name=f"shared/{key}")

    def forward(self, inputs: Tensor) -> Tensor:
        """The inputs: an `nn.Sequential` that owns this runs it as its last layer."""
        return inputs


def _widest(sites: Sequence[Site]) -> torch.dtype:
    wide = any(site.dtype == torch.float64 for site in sites)
    return torch.float64 if wide else torch.float32
