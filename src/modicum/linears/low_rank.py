"""low_rank: a weight held as the product of two thin factors, both of which are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.core.contracts.surgery import RowMap, Surgery
from modicum.core.layers.factorize import decompose, share_rank
from modicum.core.layers.linear_forms import LinearForm, StoredRows, register
from modicum.core.ranks.sharding import cut_alike, own_part, whole


class LowRankLinear(nn.Module):
    """y = (x down^T) up^T + b: the dense weight is up @ down, of rank r at most.

    It has r (in + out) elements in place of in * out, in memory and in work, so it saves where
    r < in * out / (in + out). Prefer it where a trained weight is to become smaller and stay
    trainable with ordinary kernels; `modicum.compress` chooses the factors.

    Attributes:
        down: [r, in].
        up: [out, r].
        bias: [out], or None.

    >>> layer = LowRankLinear(6, 4, rank=2, bias=False)
    >>> layer.to_dense().shape, sum(parameter.numel() for parameter in layer.parameters())
    (torch.Size([4, 6]), 20)
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__()
        rank = rank or share_rank(in_features, out_features)
        self.in_features, self.out_features, self.rank = in_features, out_features, rank
        self.down = nn.Parameter(torch.empty(rank, in_features, device=device, dtype=dtype))
        self.up = nn.Parameter(torch.empty(out_features, rank, device=device, dtype=dtype))
        empty = torch.empty(out_features, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if empty is None else nn.Parameter(empty))

    @classmethod
    def from_dense(
        cls, weight: Tensor, bias: Tensor | None = None, rank: int | None = None
    ) -> Self:
        """The layer whose product is nearest to `weight` [out, in]; `bias` [out] is not copied.

        Without a `rank` it has half the weight's elements.

        Raises:
            InputError: the rank is larger than the weight's smaller side.
        """
        outs, ins = weight.shape
        layer = cls(ins, outs, False, weight.device, weight.dtype, rank)
        with torch.no_grad():
            down, up = decompose(weight).factors(weight, layer.rank)
            layer.down.copy_(down)
            layer.up.copy_(up)
        layer.register_parameter("bias", None if bias is None else nn.Parameter(bias))
        return layer

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs [..., in] to [..., out]."""
        return F.linear(F.linear(inputs, self.down), self.up, self.bias)

    def to_dense(self) -> Tensor:
        """The weight [out, in] that the factors represent, multiplied in fp32 or wider.

        Where the factors are sharded, every rank calls this, and it is sharded as `up` is.
        """
        wide = torch.promote_types(self.up.dtype, torch.float32)
        up, down = own_part(self.up)[0], whole(self.down)
        weight = (up.to(wide) @ down.to(wide)).to(up.dtype)
        return cut_alike(weight, self.up, self.in_features)

    def extra_repr(self) -> str:
        """The sizes, as `nn.Linear` shows them."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, rank={self.rank}, bias={self.bias is not None}"


def rank_surgery(kept: Mapping[str, Sequence[int]], why: str) -> Surgery:
    """The surgery after which layers have these of their components alone.

    A component is a row of `down` with its column of `up`; the weight is the sum of their products.

    Args:
        kept: by the layer's name, the components that stay, from 0.
        why: for people.

    Raises:
        InputError: of some layer nothing is kept, or something twice.

    >>> rank_surgery({"mlp.up_proj": (0, 2)}, "drops a rank").layers
    {'mlp.up_proj': {'rank': 2}}
    """
    rows = {}
    for name, components in kept.items():
        rows[f"{name}.down"] = (RowMap(0, tuple(components)),)
        rows[f"{name}.up"] = (RowMap(1, tuple(components)),)
    return Surgery(why, {name: {"rank": len(each)} for name, each in kept.items()}, rows)


def _rows(in_features: int, out_features: int, item_bytes: int) -> StoredRows:
    rank = share_rank(in_features, out_features)
    return (rank, in_features * item_bytes), (out_features, rank * item_bytes)


# No `write`: most weights are no product of thin factors, so what wants to add to one keeps its
# addition next to the layer, or takes the dense weight.
LOW_RANK = register(
    LinearForm(
        "low_rank",
        LowRankLinear,
        LowRankLinear.from_dense,
        LowRankLinear.to_dense,
        LowRankLinear,
        exact=False,
        rows=_rows,
    )
)
