"""An adapter whose change is of the layer's own weight, and of its bias: outputs are mixed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from modicum.adapters.base import Adapter, AdapterLayer, AdapterQuery, Factor, LayerChange
from modicum.adapters.sites import Site
from modicum.core.contracts.ledger import Work
from modicum.core.contracts.method import Info
from modicum.core.errors import InputError
from modicum.core.ranks.sharding import whole


class MixedLayer(AdapterLayer):
    """y = base(x) + M dropout(base(x)) + t, with M [out, out] and t [out]."""

    M: Tensor
    t: Tensor

    def forward(self, inputs: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        outputs = base(inputs)
        wide = outputs
        if not torch.is_autocast_enabled(inputs.device.type):
            wide = outputs.to(torch.promote_types(outputs.dtype, self.M.dtype))
        dropped = F.dropout(wide, self.method.dropout, self.training)
        return (outputs + F.linear(dropped, self.M, self.t)).to(outputs.dtype)

    def change(self, weight: Tensor, bias: Tensor | None) -> LayerChange:
        mix, more = whole(self.M), whole(self.t)
        return LayerChange(mix @ weight, more if bias is None else more + mix @ bias)


class Mixed(Adapter):
    """A trained map of a layer's outputs, and a shift."""

    info = Info(
        name="mixed",
        title="Mixed: a trained map of outputs",
        room="adapters",
        paper="none",
        claim="none",
        traits=("adapts_base", "reads_base", "mergeable", "exact_resume", "compiles"),
    )
    layer = MixedLayer
    needs_input = False

    def factors(self, site: Site) -> Mapping[str, Factor]:
        if site.kind == "embedding":
            raise InputError("embeddings are left out", field="targets", value=site.name)
        return {"M": Factor((site.out_features,) * 2), "t": Factor((site.out_features,))}

    def saved_elements(self, site: Site) -> int:
        return site.out_features

    def dropout_bytes(self, at: AdapterQuery) -> int:
        return at.site.out_features * at.shape.positions * at.shape.compute_bytes

    def work(self, at: AdapterQuery) -> tuple[Work, ...]:
        product = 2 * at.shape.positions * at.site.out_features**2
        return Work(product), Work(2 * product, phase="backward")
