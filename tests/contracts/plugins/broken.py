"""An adapter with two mistakes that a reader misses: it merges half of what it does, and its
ledger forgets a factor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from modicum.adapters.base import Adapter, AdapterLayer, AdapterQuery, Factor
from modicum.adapters.sites import Site
from modicum.core.contracts.ledger import Work
from modicum.core.contracts.method import Info


class BrokenLayer(AdapterLayer):
    """y = W x + b + 2 u (v . x)."""

    def forward(self, inputs: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        thin = inputs @ self.v.to(inputs.dtype)[:, None]
        return base(inputs) + 2 * thin * self.u.to(inputs.dtype)

    def delta(self) -> Tensor:
        return torch.outer(self.u.float(), self.v.float())


class Broken(Adapter):
    """One outer product a layer, wrongly."""

    info = Info(
        name="broken",
        title="Broken: merges half of what it does",
        room="adapters",
        paper="none",
        claim="none",
        traits=("adapts_base", "mergeable"),
    )
    layer = BrokenLayer

    def factors(self, site: Site) -> Mapping[str, Factor]:
        return {"u": Factor((site.out_features,)), "v": Factor((site.in_features,), std=0.1)}

    def trained(self, site: Site) -> int:
        return site.in_features

    def saved_elements(self, site: Site) -> int:
        return 1

    def work(self, at: AdapterQuery) -> tuple[Work, ...]:
        return ()
