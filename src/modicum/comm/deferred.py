"""Replicas whose updates are deferred: sums in two halves, one behind each pass.

Gradients are reduce-scattered in groups during the backward pass and gathered during the next
forward pass, in which each weight is updated when the module that holds it is about to run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modicum.comm.fusion import Fused, fuse
from modicum.comm.tuning import Tuner
from modicum.comm.use_order import Parameters, Uses
from modicum.core.contracts.parameters import is_idle, trainable
from modicum.core.contracts.stepping import Stepper
from modicum.core.contracts.strategy import Ready, Strategy, came_late
from modicum.core.errors import InputError
from modicum.core.ranks.collectives import Collectives
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.observed_calls import label_of
from modicum.core.ranks.pretended_link import Link
from modicum.core.ranks.ranks import Ranks

# gloo works at two calls at a time. Two more keep it at work between two layers, where calls end
# and begin: at 100 Mb/s an update is 7 % faster than with two in all, and more are no faster. The
# link for the first group alone, or for the last, changes less than 1 %: of four ranks that sleep,
# with an all-reduce of 1, 2 and 4 forward passes.
IN_FLIGHT = 4


class Deferred(Strategy):
    """Replicas of which a weight is updated just before the forward pass comes to it.

    Groups are in the order of a forward pass: the last is summed first, the first gathered first.
    After `after_backward` gradients are sums, of which every rank holds a part; no parameter has a
    `grad` of its own.

    Args:
        bucket_bytes, layers, tune: as those of `modicum.comm.DeAR`.
        mean: divide the sums by the number of ranks.
        link: a slower link to pretend.

    Attributes:
        collectives: they meter what this rank sends.
    """

    def __init__(
        self,
        ranks: Ranks,
        layout: Layout,
        *,
        bucket_bytes: int,
        layers: int | None = None,
        tune: bool = False,
        mean: bool = False,
        link: Link | None = None,
    ) -> None:
        super().__init__(ranks, layout)
        self.collectives = Collectives(ranks, link=link, in_flight=IN_FLIGHT)
        self.groups: list[Fused] = []
        self._bucket_bytes, self._layers, self._tune = bucket_bytes, layers, tune
        self._tuner: Tuner | None = None
        self._divisor = ranks.size if mean else 1
        self._begun, self._learning, self._ordered = False, True, False
        self._next = 0
        self._parts: list[Tensor] = []
        self._places: dict[int, tuple[Fused, int]] = {}
        self._due: dict[int, nn.Parameter] = {}
        self._late: set[int] = set()
        self._idle: set[int] = set()
        self._settings: list[dict[str, Any]] = []
        self._stamp: float | None = None

    def start(self, model: nn.Module) -> None:
        """Give all ranks rank 0's weights, and listen for gradients and for uses of weights."""
        terms = {"bucket_bytes": self._bucket_bytes, "layers": self._layers, "tune": self._tune}
        self.meet(model, mean=self._divisor > 1, **terms)
        self._trained = dict(trainable(model))
        self._uses = Uses(model, self._before_use)
        if self._tune:
            total = sum(parameter.nbytes for parameter in self._trained.values())
            self._tuner = Tuner(total, self._bucket_bytes)
        self._cut(self._uses.layers())
        for name, parameter in self._trained.items():
            parameter.register_post_accumulate_grad_hook(partial(self._ready, name))

    def when_ready(self, model: nn.Module, handler: Ready) -> None:
        """No gradient is final in the backward pass.

        Raises:
            InputError: always.
        """
        raise InputError("gradients of deferred updates are final after the backward pass only")

    # Gradients

    def before_backward(self, *, last: bool) -> None:
        """Exchange in the last backward pass of an update only: those before it add up here."""
        super().before_backward(last=last)
        if last:
            self._begin()

    def after_backward(self) -> None:
        """Launch what is left, and wait for this rank's parts of all sums."""
        if not self._begun:
            self._begin()
        if self._learning:
            self._uses.learn(p for p in self._trained.values() if self._has_gradient(p))
            self._learning = False
        for group in self._left():
            group.reduce_scatter(self.collectives)
        self._parts = [group.land(self.collectives.rank) for group in reversed(self.groups)]
        if self._divisor > 1:
            for part in self._parts:
                part /= self._divisor
        self._begun, self._late = False, set()
        super().after_backward()

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The norm of the gradients of all trained parameters, of which ranks hold parts."""
        # In fp64, so that how groups are formed does not show in the result, which is fp32.
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in self._parts]
        return self.collectives.total(torch.stack(norms).square().sum()).sqrt().float()

    def clip(self, parameters: Iterable[nn.Parameter], largest: float, norm: Tensor) -> None:
        """Scale the gradients of all trained parameters, as `clip_grads_with_norm_` does."""
        scale = torch.clamp(largest / (norm + 1e-6), max=1.0)
        for part in self._parts:
            part *= scale

    # Updates

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin to gather the sums; weights are updated when they are used, as set now."""
        self._stepper = Stepper(optimizer)
        self._settings = self._stepper.settings()
        self._parts = []
        for group in self.groups:
            group.all_gather(self.collectives)
        self._due = {id(parameter): parameter for parameter in self._trained.values()}
        # Of the update that is deferred; when it is made, others may be idle.
        self._idle = {key for key, parameter in self._due.items() if is_idle(parameter)}

    def discard(self) -> None:
        """Forget the gradients of an update that is not to be."""
        self._parts = []
        for group in self.groups:
            group.clear()

    def flush(self, *, keep_gradients: bool = False) -> None:
        """Update all weights whose update was deferred."""
        self._update(list(self._due.values()), keep_gradients=keep_gradients)

    def _before_use(self, parameters: Parameters) -> None:
        if self._due:
            self.collectives.progress()
            self._update([parameter for parameter in parameters if id(parameter) in self._due])

    def _update(self, parameters: Parameters, *, keep_gradients: bool = False) -> None:
        """Update these, each of them due, by their gradients, which are mostly gone afterwards."""
        if not parameters:
            return
        for parameter in parameters:
            group, index = self._places[id(parameter)]
            gradient = group.gradient(index)
            parameter.grad = None if id(parameter) in self._idle else gradient
            del self._due[id(parameter)]
        if used := [parameter for parameter in parameters if parameter.grad is not None]:
            # Who evaluates in inference mode trains on with the optimizer's state.
            with torch.inference_mode(False):
                self._stepper.step(used, self._settings)
        for parameter in parameters:
            if not keep_gradients:
                parameter.grad = None
            group, _ = self._places[id(parameter)]
            if not group.due:
                group.clear()

    # An update's last backward pass

    def _begin(self) -> None:
        """Begin an update: nothing of the one before is left, and groups may be formed anew."""
        self._late = set(self._due)
        self.flush()
        if self._tuned() or not (self._learning or self._ordered):
            self._cut(self.ranks.broadcast(self._uses.layers()))
            self._ordered = not self._learning
        for group in self.groups:
            group.clear()
        self._begun, self._next = True, len(self.groups)

    def _ready(self, name: str, parameter: Tensor) -> None:
        if id(parameter) in self._due or id(parameter) in self._late:
            raise RuntimeError(
                f"{name} was used before it was updated: neither a module that holds it nor one "
                "around it ran; call flush() before such a forward pass"
            )
        if not self._last:
            return
        group, index = self._places[id(parameter)]
        if group.travels:
            raise came_late(name)
        group.fill(index)
        for group in self._left(complete=True):
            group.reduce_scatter(self.collectives)
        self.collectives.progress()

    def _left(self, *, complete: bool = False) -> Iterable[Fused]:
        """The groups that come next, in the one order of all ranks, as far as they are complete."""
        while self._next and (self.groups[self._next - 1].complete or not complete):
            self._next -= 1
            yield self.groups[self._next]

    def _has_gradient(self, parameter: nn.Parameter) -> bool:
        group, index = self._places[id(parameter)]
        return parameter.grad is not None or index in group.filled

    def _cut(self, layers: list[list[str]]) -> None:
        """Form the groups, of layers in the order in which they are used."""
        groups = fuse(
            [[self._trained[name] for name in layer] for layer in layers],
            nbytes=lambda parameter: parameter.nbytes,
            kind=lambda parameter: (parameter.dtype, parameter.device),
            bucket_bytes=self._tuner.bucket_bytes if self._tuner else self._bucket_bytes,
            count=self._layers,
        )
        names = {id(parameter): name for name, parameter in self._trained.items()}
        self.groups = [
            Fused(group, self.ranks.size, label=label_of([names[id(p)] for p in group]))
            for group in groups
        ]
        self._places = {
            id(parameter): (group, index)
            for group in self.groups
            for index, parameter in enumerate(group.parameters)
        }

    def _tuned(self) -> bool:
        """Note the time since the last update began; whether rank 0 has found another size."""
        before, self._stamp = self._stamp, time.perf_counter()
        if before is None or self._tuner is None or not self._tuner.record(self._stamp - before):
            return False
        self._tuner.bucket_bytes = self.ranks.broadcast(self._tuner.bucket_bytes)
        return True
