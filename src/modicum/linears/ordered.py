"""Factors whose components are in the order of their importance: any prefix is a smaller layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.core.layers.factorize import decompose
from modicum.core.layers.form_layer import FormLayer, TensorShapes
from modicum.core.ranks.sharding import is_sharded, laid_out_like, whole


class OrderedLinear(FormLayer):
    """y = (x down^T) up + b, where component i is row i of both factors.

    A new layer begins with the SVD of the weight that a dense one would have, the root of S on both
    sides. Components are rows, so a prefix is a prefix of memory, and where rows are sharded over
    ranks a component's norms are with one rank.

    Attributes:
        down: [r, in].
        up: [r, out].
        bias: [out], or None.
        kept: how many components are not pruned; the others take part in nothing.
        width: while it trains, how many of those the update at hand computes with; None: all.

    >>> layer = OrderedLinear.from_dense(torch.eye(3), rank=3)
    >>> layer.kept = 2
    >>> layer(torch.ones(3)).sum().item(), torch.linalg.matrix_rank(layer.to_dense()).item()
    (2.0, 2)
    """

    begins_dense = True
    down: nn.Parameter
    up: nn.Parameter

    def __init__(self, *sizes: Any, rank: int | None = None, **where: Any) -> None:
        super().__init__(*sizes, rank=rank, **where)
        self.kept, self.width = self.rank, None

    kept: int
    width: int | None

    @property
    def rank(self) -> int:
        """How many components there are, pruned ones too."""
        return self.down.shape[0]

    @classmethod
    def shapes(
        cls, in_features: int, out_features: int, rank: int | None = None, **_: Any
    ) -> TensorShapes:
        """Of both factors; without a rank they can be any weight."""
        rank = rank or min(in_features, out_features)
        return {"down": (rank, in_features), "up": (rank, out_features)}

    @classmethod
    def between(cls, in_features: int, out_features: int, rank: int | None = None, **_: Any) -> int:
        """Elements a position between the factors."""
        return rank or min(in_features, out_features)

    def arguments(self) -> dict[str, Any]:
        return {"rank": self.rank}

    def fitted(self, weight: Tensor) -> Mapping[str, Tensor]:
        """The factors whose product is nearest to `weight` [out, in].

        Raises:
            InputError: the rank is larger than the weight's smaller side.
        """
        down, up = decompose(weight).factors(weight, self.rank)
        return {"down": down, "up": up.mT}

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs [..., in] to [..., out]; with no component left, to the bias."""
        down, up = self.prefix()
        return F.linear(F.linear(inputs, down), up.mT, self.bias)

    def prefix(self) -> tuple[Tensor, Tensor]:
        """Of both factors the rows that take part in the pass at hand."""
        width = self.width if self.training and self.width is not None else self.kept
        width = min(width, self.kept)
        down: Tensor = self.down
        up: Tensor = self.up
        return (down[:width], up[:width]) if width < self.rank else (down, up)

    def to_dense(self) -> Tensor:
        """The weight [out, in] of what is kept, multiplied in fp32 or wider.

        Where the factors are sharded, every rank calls this, and it is sharded by rows.
        """
        wide = torch.promote_types(self.up.dtype, torch.float32)
        up, down = (whole(each)[: self.kept].to(wide) for each in (self.up, self.down))
        weight = (up.mT @ down).to(self.up.dtype)
        return laid_out_like(weight, self.up) if is_sharded(self.up) else weight
