"""An adapter with a term of the loss that no part of a sharded factor has, and draws anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from modicum.adapters.base import Adapter, AdapterQuery, Factor
from modicum.adapters.sites import Site
from modicum.adapters.steps import AdapterSteps, FollowingLayer
from modicum.core.contracts.ledger import Work
from modicum.core.contracts.method import Info, PositiveFloat
from modicum.core.errors import InputError
from modicum.core.random import uniform_


class PenalisedLayer(FollowingLayer):
    """y = (1 + g) base(x); in an update g is weighed by draws in (0.5, 1.5)."""

    method: Penalised
    g: Tensor
    draws: Tensor

    def forward(self, inputs: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        outputs = base(inputs)
        gain = self.g * self.draws if self.followed and self.training else self.g
        dropped = F.dropout(outputs, self.method.dropout, self.training)
        return self.noted((outputs + dropped * gain).to(outputs.dtype))

    def term(self) -> Tensor:
        return self.method.strength * (1 + self.g).norm()

    def begin(self, step: int, *, seed: int) -> None:
        drawn = torch.empty(self.draws.shape)
        self.draws.copy_(uniform_(drawn, 0.5, 1.5, seed=seed, name=self.site.name, step=step))

    def change(self, weight: Tensor, bias: Tensor | None) -> None:
        return None


class Penalised(Adapter):
    """A gain of each output, whose distance from zero costs.

    Args:
        strength: what the norm of all gains of a layer is multiplied with.
    """

    info = Info(
        name="penalised",
        title="Penalised: an adapter with a term of the loss",
        room="adapters",
        paper="none",
        claim="none",
        traits=("adapts_base", "reads_base", "follows_steps", "exact_resume", "compiles"),
    )
    layer = PenalisedLayer
    needs_input = False

    strength: PositiveFloat = 0.05

    def factors(self, site: Site) -> Mapping[str, Factor]:
        if site.kind == "embedding":
            raise InputError("embeddings are left out", field="targets", value=site.name)
        return {"g": Factor((site.out_features,))}

    def frozen(self, site: Site) -> Mapping[str, Factor]:
        return {"draws": Factor((site.out_features,), precise=True)}

    def run_hook(self, bound: object) -> object:
        return AdapterSteps(bound)

    def saved_elements(self, site: Site) -> int:
        return site.out_features

    def dropout_bytes(self, at: AdapterQuery) -> int:
        return at.site.out_features * at.shape.positions * at.shape.compute_bytes

    def work(self, at: AdapterQuery) -> tuple[Work, ...]:
        return ()
