"""Means over positions of what goes into layers and of the gradients of what comes out.

Two vectors a layer, [a (in) | 1 | g (out)], of all layers in one flat tensor: one exchange sums
them over ranks, and the running average is one operation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from modicum.core.clock import WIRE
from modicum.core.contracts.ledger import Entry, Ledger, Phase, Wire, Work
from modicum.core.errors import InputError
from modicum.core.ranks.ranks import Ranks, peer_errors
from modicum.optim.capture import Capture, CapturedLayer
from modicum.optim.curvature import CurvatureRuntime
from modicum.optim.layer_vectors import LayerVectors
from modicum.optim.transform import GradientRows, TransformContext, TransformQuery

_KEPT: tuple[Phase, ...] = ("forward", "loss", "backward")


class RunningMeans(LayerVectors):
    """The sums of the update at hand, and the running averages of the means of all before it.

    The 1 in a layer's slice is 0 until the layer was seen: the first mean is taken as it is. In an
    update in which a layer is not used its average stays, and so do all where a mean is not finite.

    Args:
        layers: in the order of their slices.
        gradients: whether there is a g.
        dtype, device: of both flat tensors.
    """

    def __init__(
        self,
        layers: Sequence[CapturedLayer],
        gradients: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(layers, gradients, dtype, device)
        self.averages = torch.zeros_like(self.sums)
        self.vectors = self.pairs(self.averages)
        """Views of each layer's averages a, which ends in the 1 where it has a bias, and g."""
        cuts = [
            [len(a), int(at.bias is None), len(g)]
            for at, (a, g) in zip(layers, self.vectors, strict=True)
        ]
        self._cuts = torch.tensor(cuts, device=device).flatten()

    @property
    def seen(self) -> Tensor:
        """Of each layer, whether it was ever seen: bool [layers], on the device."""
        return self.averages[self.ones] > 0

    def squares(self) -> tuple[Tensor, Tensor]:
        """a^T a and g^T g of each layer: [layers] each."""
        sums = torch.segment_reduce(
            self.averages.square(), "sum", lengths=self._cuts, unsafe=True, initial=0
        )
        return sums[0::3], sums[2::3]

    def exchange(self, ranks: Ranks) -> None:
        """Add up the sums and counts of all ranks."""
        if not ranks.alone:
            with ranks.clock(WIRE), peer_errors():
                dist.all_reduce(self.sums)

    def average(self, decay: float, gradient_scale: float = 1.0) -> None:
        """Average the means into what there is; the new ones weigh `decay`.

        Args:
            gradient_scale: g is multiplied with it.
        """
        counts = self.sums[self.ones]
        fresh = self.sums / self.repeated(counts.clamp(min=1))
        if gradient_scale != 1.0:
            for layer, part in zip(self.layers, self.split(fresh), strict=True):
                part[layer.in_features + 1 :] *= gradient_scale
        finite = fresh.isfinite().all()
        weight = torch.where(self.seen, decay, 1.0) * ((counts > 0) & finite)
        fresh = torch.where(finite, fresh, self.averages)
        self.averages.copy_(torch.lerp(self.averages, fresh, self.repeated(weight)))

    def state_dict(self) -> dict[str, Tensor]:
        """The averages by the weight's name: `.input_mean` [in + 1], `.output_gradient_mean`."""
        state = {}
        for layer, part in zip(self.layers, self.split(self.averages), strict=True):
            width = layer.in_features + 1
            state[f"{layer.weight}.input_mean"] = part[:width]
            if len(part) > width:
                state[f"{layer.weight}.output_gradient_mean"] = part[width:]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put averages back.

        Raises:
            InputError: names or shapes are others than those of these layers.
        """
        own = self.state_dict()
        if own.keys() != state.keys():
            different = sorted(own.keys() ^ state.keys())[:3]
            raise InputError(f"the checkpoint has the means of other layers: {different}")
        for name, mean in own.items():
            if mean.shape != state[name].shape:
                raise InputError(
                    f"has shape {tuple(state[name].shape)}, this model's {tuple(mean.shape)}",
                    field=name,
                )
            mean.copy_(state[name])


class MeansRuntime(CurvatureRuntime):
    """A transform that works with the running means of each layer. Subclasses give `transform`.

    Args:
        exclude: layers to leave as they are.
        gradients: whether there is a g.
        hooked: whether means are captured; if not, a and g are those of each weight's gradient over
            its rows and over its columns, and biases keep their gradient.
        decay: the weight of new means.
        every: means are taken in every n-th update.
        samples: see `Sums`.
    """

    def __init__(
        self,
        context: TransformContext,
        *,
        exclude: Sequence[str],
        gradients: bool,
        hooked: bool,
        decay: float,
        every: int,
        samples: int | None,
    ) -> None:
        super().__init__(context, exclude, every=every)
        if not hooked:
            self.layers = [replace(layer, bias=None) for layer in self.layers]
        self.hooked, self.decay, self._gradients, self._samples = hooked, decay, gradients, samples
        self.open()

    def open(self) -> None:
        """Take memory for the averages, and put hooks on the layers."""
        self.means = RunningMeans(self.layers, self._gradients, self.dtype, self.device)
        self.capture = Capture(self.means.accumulators(self._samples) if self.hooked else ())

    def take_up(self, gradient_scale: float) -> None:
        """Average the update's means into what there is."""
        if self.hooked:
            self.means.exchange(self.context.ranks)
            self.means.average(self.decay, gradient_scale)
        else:
            self._look_at_gradients()
            self.means.average(self.decay)

    def forget(self) -> None:
        """Begin new sums."""
        self.means.sums.zero_()

    def release(self) -> None:
        """Give the averages' memory back."""
        del self.means

    def _look_at_gradients(self) -> None:
        parts = self.means.split(self.means.sums)

        def look(index: int, rows: GradientRows) -> None:
            layer, matrix, sums = self.layers[index], rows.matrix, parts[index]
            width = layer.in_features
            sums[:width], sums[width] = matrix.sum(0), len(matrix)
            sums[width + 1 :][rows.own] = matrix.mean(1) * layer.out_features

        self.each(look)
        self.sum_over_shards(self.means.sums)

    def kept(self) -> dict[str, Any]:
        """The averages."""
        return dict(self.means.state_dict())

    def put_back(self, state: Mapping[str, Any]) -> None:
        """Put averages back."""
        self.means.load_state_dict({name: state[name] for name in state if name != "updates"})


def means_ledger(at: TransformQuery, *, gradients: bool, hooked: bool) -> Ledger:
    """What a `MeansRuntime` spends in addition to its `transform`.

    Averages and sums are 4 (in + 1 + out) bytes a layer, of which the sums cross the wire once an
    update. The work is that of linear layers; convolutions' positions are more than `at` says.
    """
    sides = [(p.shape[0], math.prod(p.shape[1:])) for p in at.layers]
    vectors = 4 * sum(i + 1 + gradients * o for o, i in sides)
    held = [4 * p.rows(0, at.shards) * i for p, (_, i) in zip(at.layers, sides, strict=True)]
    copies = (size for size, p in zip(held, at.layers, strict=True) if p.element_bytes < 4)
    seen = at.positions * sum(i + gradients * o for o, i in sides)
    over, axis = (at.ranks, "data") if hooked else (at.shards, "shard")
    wire = Wire("all_reduce", 2 * vectors * (over - 1) // over, axis)
    return Ledger.of(
        Entry("optimizer", vectors, what="running averages"),
        Entry("buffer", vectors, what="sums of the update"),
        Entry("activation", hooked * 4 * sum(i for _, i in sides), _KEPT, "sums of inputs"),
        Entry("workspace", 4 * vectors + max(copies, default=0), ("step",), "averages, rows"),
        *([Work(seen, phase="backward")] if hooked else []),
        *([wire] if wire.bytes else []),
    )
