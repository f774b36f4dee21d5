"""Adapters that train a small square matrix between two frozen factors: dW = s B R A."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from modicum.adapters.base import AdapterQuery, Factor
from modicum.adapters.fused import plus_low_rank
from modicum.adapters.lora import LoRA
from modicum.adapters.lora_layer import LoRALayer
from modicum.adapters.sites import Site
from modicum.adapters.widths import check_rank
from modicum.core.errors import InputError
from modicum.core.ranks.sharding import whole


class MiddleFactorLayer(LoRALayer):
    """y = W x + b + s B (R (A dropout(x))), with R [r, r] trained; A [r, in] and B [out, r] not.

    A takes no gradient, so no input is kept. B R is one matrix, for positions are many and r small;
    it is made anew in the backward pass.
    """

    R: Tensor

    def forward(self, inputs: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        a, b = self.A, self.B
        return plus_low_rank(inputs, base, a, b, self.scale, self.dropout, middle=self.R)

    def as_lora(self) -> tuple[Tensor, Tensor, float]:
        return self.A, self.B @ whole(self.R).to(self.B.dtype), self.method.scale


class MiddleFactor(LoRA):
    """What these have in common: their sizes, and what they spend; subclasses say what B and A are.

    Raises:
        InputError: a layer is narrower than `rank`, or an embedding.
    """

    needs_input = False

    def factors(self, site: Site) -> Mapping[str, Factor]:
        if site.kind != "linear":
            problem = f"it adapts linear layers, and this is of kind {site.kind}; leave it out"
            raise InputError(problem, field="targets", value=site.name)
        check_rank(self.rank, site)
        return {"R": Factor((self.rank, self.rank))}

    def outer(self, site: Site) -> Mapping[str, Factor]:
        """A and B, which are not trained."""
        return {
            "A": Factor((self.rank, site.in_features)),
            "B": Factor((site.out_features, self.rank)),
        }

    def saves_input(self, site: Site) -> bool:
        return False

    def operations(self, at: AdapterQuery) -> tuple[int, int]:
        ins, outs, rank = at.site.in_features, at.site.out_features, self.rank
        down, up = (2 * at.shape.positions * rank * width for width in (ins, outs))
        between = 2 * outs * rank**2
        return down + up + between, down + 2 * (up + between)
