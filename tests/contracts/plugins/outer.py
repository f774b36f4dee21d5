"""A whole adapter in one file of a user's own: method, layer and proof."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from modicum.adapters.base import Adapter, AdapterLayer, AdapterQuery, Factor
from modicum.adapters.sites import Site
from modicum.core.contracts.ledger import Work
from modicum.core.contracts.method import Info, PositiveFloat
from modicum.core.contracts.search import LogRange, SearchTable


class OuterLayer(AdapterLayer):
    """y = W x + b + s u (v . dropout(x)), with u [out] and v [in]."""

    def forward(self, inputs: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        dropped = torch.nn.functional.dropout(inputs, self.method.dropout, self.training)
        thin = torch.nn.functional.linear(dropped, self.v.to(inputs.dtype)[None])
        out = torch.nn.functional.linear(thin, self.u.to(thin.dtype)[:, None])
        return base(inputs) + self.method.scale * out

    def delta(self) -> Tensor:
        return self.method.scale * torch.outer(self.u.float(), self.v.float())

    def as_lora(self) -> tuple[Tensor, Tensor, float]:
        return self.v[None], self.u[:, None], self.method.scale


class Outer(Adapter):
    """One outer product a layer.

    Args:
        scale: s.
    """

    info = Info(
        name="outer",
        title="Outer: one outer product a layer",
        room="adapters",
        paper="none",
        claim="one number a row and a column",
        traits=("adapts_base", "mergeable", "is_lora", "exact_resume", "compiles"),
    )
    search = SearchTable({"scale": LogRange(0.1, 10.0, 2.0)})
    layer = OuterLayer

    scale: PositiveFloat = 2.0

    def factors(self, site: Site) -> Mapping[str, Factor]:
        return {"u": Factor((site.out_features,)), "v": Factor((site.in_features,), std=0.1)}

    def saved_elements(self, site: Site) -> int:
        return 1

    def work(self, at: AdapterQuery) -> tuple[Work, ...]:
        product = 2 * at.shape.positions * (at.site.out_features + at.site.in_features)
        return Work(product), Work(2 * product, phase="backward")


def prove(run) -> None:
    value = run.contender(Outer(), null=None, null_is="no adapter at all")
    trained = 0 if value is None else 24
    run.figure("trained", method=trained, baseline=1000, claimed="few")
    run.at_least("something is trained", trained, 1)
