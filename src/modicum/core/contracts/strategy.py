"""What it takes to run a model on several ranks, and the case of one, in which it takes nothing.

A strategy sees the model twice: while it has no memory yet, where parameters may be sharded, and
when it is loaded. In a step it learns before each backward pass whether it is the update's last
one; after it, gradients are *sums* over the ranks. The losses that they come from were scaled by
the count of the full update, so nothing is averaged.

The update itself goes through the strategy too: some put it off into the next forward pass, so
whoever reads weights calls `flush` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modicum.core.clock import WIRE
from modicum.core.contracts.parameters import trainable
from modicum.core.errors import InputError
from modicum.core.ranks.agreement import same_model, same_terms, shape_terms
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.observed_calls import AGREEMENT, naming
from modicum.core.ranks.ranks import Ranks, peer_errors
from modicum.core.ranks.sharding import is_sharded

if TYPE_CHECKING:
    from modicum.core.contracts.state import StateRegistry

Ready = Callable[[nn.Parameter], None]


def came_late(name: str) -> InputError:
    """What to raise where a parameter gets a gradient after the sum of it has begun."""
    return InputError(
        "its gradient comes in several parts in one backward pass, and the sum over the ranks had "
        "begun with the first, as where a weight is used in several reentrant checkpoints; use "
        "checkpoint(..., use_reentrant=False)",
        field=name,
    )


class Strategy:
    """One process alone, for which there is nothing to do; strategies for several build on it.

    Args:
        ranks: this process among the others.
        layout: how they share the work.
    """

    def __init__(self, ranks: Ranks | None = None, layout: Layout | None = None) -> None:
        self.ranks, self.layout = ranks or Ranks(), layout or Layout()
        self._last = False

    # Building

    def cut(
        self,
        model: nn.Module,
        blocks: Iterable[nn.Module],
        device: torch.device,
        methods: Iterable[str] = (),
    ) -> None:
        """Shard a model on meta into what each rank holds.

        Args:
            blocks: parts of the model that are gathered one at a time.
            methods: of the model, other than `forward`, called from outside and using weights.
        """

    def start(self, model: nn.Module) -> None:
        """Begin with a loaded model.

        Raises:
            InputError: another rank's has other trained parameters.
        """
        self.meet(model)

    def meet(self, model: nn.Module, **terms: int | bool | None) -> None:
        """Make sure that all ranks train the same alike, and give them rank 0's values.

        Args:
            terms: by which a rank's calls follow from its model.

        Raises:
            InputError: another rank has other terms, or its model other trained parameters.
        """
        same_terms(self.ranks, "strategy", {"kind": type(self).__name__, **terms})
        same_model(self.ranks, model)
        self.share(model)

    def trained(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """What an optimizer trains, by the model's names: the model's own parameters, or masters.

        Asked after `start`.
        """
        return trainable(model)

    def held(self) -> Iterable[Tensor]:
        """The tensors that persist next to the model's own, now: masters, copies of weights."""
        return ()

    def register(self, registry: StateRegistry, model: nn.Module) -> None:
        """Register the state that a checkpoint holds next to the optimizer's: the trained weights.

        A strategy that keeps more (error feedback, copies) adds views of its own.
        """
        from modicum.core.contracts.state import model_view

        registry.add_view(model_view(model))

    # Gradients

    def when_ready(self, model: nn.Module, handler: Ready) -> None:
        """Have `handler` called with each trained parameter once its gradient is final.

        That is in the update's last backward pass, after the sum over the ranks, as early as it is
        known, and on all ranks in one order. The handler may use the gradient up: set it to None.
        """

        def ready(parameter: Tensor) -> None:
            if self._last:
                handler(parameter)  # type: ignore[arg-type]

        for _, parameter in self.trained(model):
            parameter.register_post_accumulate_grad_hook(ready)

    def before_backward(self, *, last: bool) -> None:
        """A backward pass follows, which is the update's last one or not."""
        self._last = last

    def after_backward(self) -> None:
        """The last backward pass is done: from here on gradients are sums over the ranks."""
        self._last = False

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The norm of all gradients together: one element, the same on every rank."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        with naming(AGREEMENT):
            return torch.nn.utils.get_total_norm(gradients)

    def clip(self, parameters: Iterable[nn.Parameter], largest: float, norm: Tensor) -> None:
        """Scale all gradients so that their norm, which is `norm`, is at most `largest`."""
        torch.nn.utils.clip_grads_with_norm_(parameters, largest, norm)

    # Updates

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the weights by their gradients, now or when they are next used."""
        optimizer.step()
        self.updated()

    def updated(self) -> None:
        """What `trained` gave has new values: whoever computes with copies brings these up."""

    def discard(self) -> None:
        """Forget the gradients of an update that is not to be."""

    def flush(self, *, keep_gradients: bool = False) -> None:
        """Finish updates that were deferred: from here on weights may be read.

        Args:
            keep_gradients: leave the gradients of these updates in the parameters' `grad`, as
                updates leave them that were not deferred.
        """

    def rest(self, model: nn.Module) -> None:
        """Forward passes without a backward one are done; give back what was gathered for them."""

    @torch.no_grad()
    def share(self, model: nn.Module) -> None:
        """Give every rank rank 0's values of unsharded parameters that are trained, and of buffers.

        They are functions of the recipe already; but hosts of different kinds may differ in the
        last bit of a logarithm, and replicas must not.
        """
        if self.ranks.alone:
            return
        trained = [p for p in model.parameters() if p.requires_grad]
        with self.ranks.clock(WIRE), peer_errors():
            for tensor in [*trained, *model.buffers()]:
                if not is_sharded(tensor):
                    _broadcast(tensor.detach())

    @torch.no_grad()
    def share_frozen(self, model: nn.Module) -> None:
        """Give every rank rank 0's values of frozen parameters, unsharded and of floating point.

        For loops of one's own, where no recipe says that they are alike; `start` leaves them.

        Raises:
            InputError: another rank has other ones.
        """
        frozen = {
            name: parameter
            for name, parameter in model.named_parameters()
            # Codes of a compressed base, of types of their own, come from the same files.
            if not parameter.requires_grad
            and type(parameter) is nn.Parameter
            and parameter.is_floating_point()
            and not is_sharded(parameter)
        }
        if self.ranks.alone:
            return
        same_terms(self.ranks, "frozen model", shape_terms(frozen.items()))
        with self.ranks.clock(WIRE), peer_errors():
            for parameter in frozen.values():
                _broadcast(parameter.detach())


def _broadcast(tensor: Tensor) -> None:
    """Give every rank rank 0's values of a tensor, whatever its dtype and strides.

    gloo sends as many elements as there are from the first one's memory on, of the dtypes it knows.
    """
    if not tensor.numel():
        return
    for dimension, stride in enumerate(tensor.stride()):
        if not stride:  # the same memory again and again, as `expand` gives it
            tensor = tensor.narrow(dimension, 0, 1)
    sent = tensor.contiguous()
    dist.broadcast(sent.reshape(-1).view(torch.uint8), 0)
    if not tensor.is_contiguous():  # else it is the same memory
        tensor.copy_(sent)
