"""What it takes to run a model on several ranks, and the case of one, in which it takes nothing.

A strategy sees the model twice: while it has no memory yet, where parameters may be cut up, and
when it is loaded. In a step it is told before each backward pass whether it is the update's last
one; after it, gradients are *sums* over the ranks. The losses that they come from were scaled by
the count of the whole update, so nothing is averaged.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from modicum.core.layout import Layout
from modicum.core.ranks import Ranks, peer_errors
from modicum.core.sharding import is_sharded


class Strategy:
    """One process alone, for which there is nothing to do; strategies for several build on it.

    Args:
        ranks: this process among the others.
        layout: how they share the work.
    """

    def __init__(self, ranks: Ranks | None = None, layout: Layout | None = None) -> None:
        self.ranks, self.layout = ranks or Ranks(), layout or Layout()

    def cut(
        self,
        model: nn.Module,
        blocks: Iterable[nn.Module],
        device: torch.device,
        methods: Iterable[str] = (),
    ) -> None:
        """Cut a model on meta into what each rank holds.

        Args:
            blocks: parts of the model that are gathered one at a time.
            methods: of the model, beside `forward`, that are called from outside and use weights.
        """

    def start(self, model: nn.Module) -> None:
        """Begin with a loaded model."""
        self.share(model)

    def before_backward(self, *, last: bool) -> None:
        """A backward pass follows, which is the update's last one or not."""

    def after_backward(self) -> None:
        """The last backward pass is done: from here on gradients are sums over the ranks."""

    def rest(self, model: nn.Module) -> None:
        """Forward passes without a backward one are done; give back what was gathered for them."""

    @torch.no_grad()
    def share(self, model: nn.Module) -> None:
        """Give every rank rank 0's values of whole parameters that are trained, and of buffers.

        They are functions of the recipe already; but hosts of different kinds may differ in the
        last bit of a logarithm, and replicas must not.
        """
        if self.ranks.alone:
            return
        trained = [p for p in model.parameters() if p.requires_grad]
        with peer_errors():
            for tensor in [*trained, *model.buffers()]:
                if not is_sharded(tensor):
                    dist.broadcast(tensor.detach(), 0)
