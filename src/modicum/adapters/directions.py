"""Adapters that train how much a weight has of some directions that it has already.

The change of W is up diag(shift) down: k products of a column and a row that a decomposition of W
gives, each with one trained number. W is untouched, so adapters share it, and a file has k numbers
a layer; the directions are computed again where it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from modicum.adapters.base import Adapter, AdapterQuery, Factor
from modicum.adapters.base_weights import at_least_fp32
from modicum.adapters.convolutions import plus_convolved
from modicum.adapters.deriving_layer import DerivingLayer, fingerprint
from modicum.adapters.fused import compute_dtype
from modicum.adapters.fused_directions import operations, plus_directions
from modicum.adapters.kronecker import folds
from modicum.adapters.sites import Site
from modicum.core.errors import InputError
from modicum.core.ranks.sharding import whole


class DirectionsLayer(DerivingLayer):
    """y = W x + b + up (shift * (down dropout(x))): up [out, k], down [k, in], shift [k] trained.

    Subclasses give `directions`.
    """

    method: Directions
    shift: Tensor
    up: Tensor
    down: Tensor

    def directions(self, weight: Tensor) -> dict[str, Tensor]:
        """`up`, `down` and the method's other derived tensors for a weight [out, in]."""
        raise TypeError(f"{type(self).__name__} defines no directions()")

    def derive(self, weight: Tensor) -> Mapping[str, Tensor]:
        if not weight.any():
            problem = "its weight is zero, so it has no directions; exclude the layer"
            raise InputError(problem, value=self.site.name)
        made = self.directions(weight)
        return {**made, "fingerprint": fingerprint(made["up"], made["down"])}

    def forward(self, inputs: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        return self.along(inputs, base, self.shift, built=self.method.builds(self.site))

    def along(
        self,
        inputs: Tensor,
        base: Callable[[Tensor], Tensor],
        d: Tensor,
        *,
        built: bool,
        low: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """base(inputs), and the change along the first directions by d [j], and by a pair `low`.

        Args:
            built: as of `plus_directions`; convolutions leave it unread.
            low: A [i, in] and B [out, i], whose product is added to the change.
        """
        dropout, down, up = self.dropout, self.down[: len(d)], self.up[:, : len(d)]
        if self.site.kind == "convolution":
            a, b = joined(d, down, up, low)
            dtype = compute_dtype(inputs, d)
            return plus_convolved(self.layer, inputs, base, a, b, dtype, dropout=dropout)
        return plus_directions(inputs, base, d, down, up, dropout, built=built, low=low)

    def delta(self) -> Tensor:
        a, b, _ = self.as_lora()
        return b @ a

    def as_lora(self) -> tuple[Tensor, Tensor, float]:
        shift = at_least_fp32(whole(self.shift)).to(self.up.dtype)
        return self.down, self.up * shift, 1.0


def joined(
    d: Tensor, down: Tensor, up: Tensor, low: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """The one pair A, B with B A = up diag(d) down and what the other pair gives."""
    if low is None:
        return down, up * d
    return torch.cat([down, low[0]]), torch.cat([up * d, low[1]], 1)


class Directions(Adapter):
    """An adapter along the directions of a layer's weight: one trained number each, zero at first.

    A convolution's weight is the matrix [out, in kh kw / groups].
    """

    needs_input = False
    drops_by_bits = True

    def rank_at(self, site: Site) -> int:
        """k, the directions of a site.

        Raises:
            InputError: the method's sizes do not fit the site.
        """
        raise TypeError(f"{type(self).__name__} defines no rank_at()")

    def factor(self, site: Site) -> Factor:
        """The trained vector."""
        return Factor((self.rank_at(site),))

    def factors(self, site: Site) -> Mapping[str, Factor]:
        self.check_kind(site)
        return {"shift": self.factor(site)}

    def check_kind(self, site: Site) -> None:
        """Make sure that a site is a layer with a weight that has directions.

        Raises:
            InputError: it is an embedding.
        """
        if site.kind not in ("linear", "convolution"):
            problem = "directions are those of a linear layer's weight; leave this one out"
            raise InputError(problem, field="targets", value=site.name)

    def derived(self, site: Site) -> Mapping[str, Factor]:
        rank = self.rank_at(site)
        return {
            "up": Factor((site.out_features, rank)),
            "down": Factor((rank, site.in_features)),
        }

    def builds(self, site: Site) -> bool:
        """Whether the change is made once a product, as a matrix: where it has full rank."""
        full = self.rank_at(site) == min(site.in_features, site.out_features)
        return full and site.kind == "linear"

    def saves_input(self, site: Site) -> bool:
        return self.builds(site) or site.kind == "convolution"

    def saved_elements(self, site: Site) -> int:
        return 0 if self.builds(site) else self.rank_at(site)

    def matrices_kept(self, at: AdapterQuery) -> int:
        return 0

    def operations(self, at: AdapterQuery) -> tuple[int, int]:
        site, count = at.site, self.rank_at(at.site)
        built, folded = self.builds(site), folds(self.dropout, at.shape.compute_bytes)
        shape = site.out_features, site.in_features
        forward, backward = operations(at.shape.positions, count, shape, built=built, folds=folded)
        return forward, backward
