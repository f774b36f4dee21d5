"""Two vectors a layer, of what goes in and of the gradients of what comes out, in one flat tensor.

A layer's slice is [a (in) | positions | g (out)]: what is done for all layers is one operation, and
what ranks exchange is one exchange.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modicum.core.clock import WIRE
from modicum.core.ranks.ranks import Ranks, peer_errors
from modicum.optim.capture import CapturedLayer
from modicum.optim.layer_sums import Sums


class LayerVectors:
    """The sums of the update at hand over positions, which hooks add up.

    Args:
        layers: in the order of their slices.
        gradients: whether there is a g.
        dtype, device: of the flat tensor.
    """

    def __init__(
        self,
        layers: Sequence[CapturedLayer],
        gradients: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = layers
        self.sizes = [at.in_features + 1 + gradients * at.out_features for at in layers]
        self.sums = torch.zeros(sum(self.sizes), dtype=dtype, device=device)
        ends = [sum(self.sizes[:number]) for number in range(len(layers))]
        ones = [end + at.in_features for end, at in zip(ends, layers, strict=True)]
        self.ones = torch.tensor(ones, device=device)
        """Where the counts of positions are."""
        self._repeats = torch.tensor(self.sizes, device=device)

    def accumulators(
        self, samples: int | None = None, *, over_places: bool = False
    ) -> list[tuple[nn.Module, Sums]]:
        """For each module what sums it up; tied modules share a slice.

        Args:
            samples, over_places: see `Sums`.
        """
        parts = zip(self.layers, self.split(self.sums), strict=True)
        return [
            (module, Sums(module, part, samples, over_places=over_places))
            for layer, part in parts
            for module in layer.modules
        ]

    def split(self, flat: Tensor) -> tuple[Tensor, ...]:
        """The slices of the layers, which are views."""
        return flat.split(self.sizes)

    def pairs(self, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Views of each layer's a, which ends in its 1 where the layer has a bias, and g."""
        parts = zip(self.layers, self.split(flat), strict=True)
        return [
            (part[: at.in_features + (at.bias is not None)], part[at.in_features + 1 :])
            for at, part in parts
        ]

    def repeated(self, of_layers: Tensor) -> Tensor:
        """A number a layer, repeated over its slice."""
        size = len(self.sums)  # said, since asking the device for it would wait
        return of_layers.to(self.sums).repeat_interleave(self._repeats, output_size=size)


class UpdateVectors(LayerVectors):
    """Of each layer the *mean* input a and the *sum* g of output gradients, of one update alone.

    With losses scaled by the update's count, g is that of the mean loss times the positions that it
    is a mean of: a curvature that does not fall with the batch. Nothing is averaged over updates.
    """

    def taken(
        self,
        ranks: Ranks,
        *,
        gradient_scale: float,
        limit: float,
        wire: torch.dtype,
        sound: Tensor,
    ) -> list[tuple[Tensor, Tensor] | None]:
        """The vectors of all ranks together; None for a layer that no position passed.

        Two exchanges: counts of positions (fp32, one a layer), by which each rank scales its share,
        and the vectors in `wire`'s precision. There is no second one where the first shows that
        some number is none.

        Args:
            gradient_scale: g is multiplied with it.
            limit: elements are clamped to [-limit, limit].
            sound: whether all else that the update is made of is finite on this rank: one bool.
        """
        good = sound & self.sums.isfinite().all()
        counts = torch.cat([self.sums[self.ones], (~good).to(self.sums)[None]])
        if wire is torch.float16:
            counts = counts.float()
        self._add_up(counts, ranks)
        *seen, bad = counts.tolist()
        if bad:
            return [None] * len(self.layers)
        flat = self.sums / self.repeated(counts[:-1].clamp(min=1))
        for layer, own, part in zip(
            self.layers, self.split(self.sums), self.split(flat), strict=True
        ):
            part[layer.in_features + 1 :] = own[layer.in_features + 1 :] * gradient_scale
        if not ranks.alone:
            # So that no sum over ranks leaves the range of what is sent.
            most = torch.finfo(wire).max / ranks.size
            flat = self._add_up(flat.clamp(-most, most).to(wire), ranks).to(self.sums)
        pairs = self.pairs(flat.clamp_(-limit, limit))
        return [pair if count else None for pair, count in zip(pairs, seen, strict=True)]

    @staticmethod
    def _add_up(tensor: Tensor, ranks: Ranks) -> Tensor:
        if not ranks.alone:
            with ranks.clock(WIRE), peer_errors():
                dist.all_reduce(tensor)
        return tensor
