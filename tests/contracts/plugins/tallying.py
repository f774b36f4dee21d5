"""An adapter that counts: rows of its inputs, and how often its outputs are positive."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from modicum.adapters.base import Adapter, AdapterQuery, Factor
from modicum.adapters.sites import Site
from modicum.adapters.steps import AdapterSteps, FollowingLayer
from modicum.core.contracts.ledger import Work
from modicum.core.contracts.method import Info
from modicum.core.errors import InputError


class TallyingLayer(FollowingLayer):
    """y = (1 + g) base(x) with g [out]; `seen` [2] are the positions and the positive outputs."""

    g: Tensor
    seen: Tensor

    @property
    def counted(self) -> int:
        return 2

    def forward(self, inputs: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        outputs = base(inputs)
        dropped = F.dropout(outputs, self.method.dropout, self.training)
        changed = (outputs + dropped * self.g).to(outputs.dtype)
        rows = torch.ones_like(inputs[..., 0]).sum()
        return self.noted(changed, torch.stack([rows.float(), (outputs > 0).float().sum()]))

    def follow(self, counts: Tensor) -> None:
        self.seen += counts.to(self.seen)

    def change(self, weight: Tensor, bias: Tensor | None) -> None:
        return None


class Tallying(Adapter):
    """A gain of each output, and counts that move with the updates."""

    info = Info(
        name="tallying",
        title="Tallying: an adapter that counts",
        room="adapters",
        paper="none",
        claim="none",
        traits=("adapts_base", "reads_base", "follows_steps", "exact_resume", "compiles"),
    )
    layer = TallyingLayer
    needs_input = False

    def factors(self, site: Site) -> Mapping[str, Factor]:
        if site.kind == "embedding":
            raise InputError("embeddings are left out", field="targets", value=site.name)
        return {"g": Factor((site.out_features,))}

    def frozen(self, site: Site) -> Mapping[str, Factor]:
        return {"seen": Factor((2,), precise=True)}

    def run_hook(self, bound: object) -> object:
        return AdapterSteps(bound)

    def saved_elements(self, site: Site) -> int:
        return site.out_features

    def dropout_bytes(self, at: AdapterQuery) -> int:
        return at.site.out_features * at.shape.positions * at.shape.compute_bytes

    def work(self, at: AdapterQuery) -> tuple[Work, ...]:
        return ()
