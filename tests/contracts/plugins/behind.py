"""An adapter that changes what blocks, or modules in them, give: behind them and next to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

from modicum.adapters.base import Adapter, AdapterLayer, AdapterQuery, Factor, LayerChange
from modicum.adapters.sites import Site
from modicum.core.contracts.ledger import Work
from modicum.core.contracts.method import Info, Names


class BehindLayer(AdapterLayer):
    """y = m(x) + u tanh(v . dropout(m(x) + x))."""

    def forward(self, inputs: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        outputs = base(inputs)
        seen = F.dropout(outputs + inputs, self.method.dropout, self.training)
        thin = F.linear(seen, self.get_parameter("v").to(seen.dtype)[None]).tanh()
        more = F.linear(thin, self.get_parameter("u").to(thin.dtype)[:, None])
        return (outputs + more).to(outputs.dtype)

    def change(self, weight: Tensor, bias: Tensor | None) -> LayerChange | None:
        return None


class Behind(Adapter):
    """One direction that blocks read and write."""

    info = Info(
        name="behind",
        title="Behind: one direction of a block's output",
        room="adapters",
        paper="none",
        claim="none",
        traits=("adapts_base", "after_block", "exact_resume", "compiles"),
    )
    layer = BehindLayer
    needs_input = False

    targets: Names = ("all-blocks",)

    def factors(self, site: Site) -> Mapping[str, Factor]:
        width = site.out_features
        return {"u": Factor((width,)), "v": Factor((width,), std=0.1)}

    def saved_elements(self, site: Site) -> int:
        return 1 + site.out_features

    def work(self, at: AdapterQuery) -> tuple[Work, ...]:
        product = 4 * at.shape.positions * at.site.out_features
        return Work(product), Work(2 * product, phase="backward")
