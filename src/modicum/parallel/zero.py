"""Data parallelism with the optimizer's state cut over ranks, and a whole model on each: ZeRO.

Every rank computes with a whole copy of the model, in the model's dtype. What is trained are
*masters*: fp32 parameters of which each rank holds some rows, as DTensors cut along dimension 0, so
that optimizers and checkpoints see what they see under FSDP2. Gradients are summed to their owners
while the backward pass runs; after an update the owners' new weights go into all copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.exchange import ExchangeContext, ShardExchange
from modicum.core.layout import Layout
from modicum.core.parameters import trainable
from modicum.core.ranks import Ranks
from modicum.core.sharding import whole
from modicum.core.state import StateRegistry, View, model_view
from modicum.core.strategy import Ready, Strategy
from modicum.parallel.masters import MasterBucket
from modicum.parallel.replicated import cut_buckets
from modicum.parallel.rows import EXCHANGE


class Zero(Strategy):
    """A whole model on each rank; masters, gradients and optimizer state cut over the ranks.

    Next to `Replicated` it saves the optimizer's state, and sends as much; next to FSDP2 it holds
    all weights, and gathers them once an update, whatever the number of micro-batches.

    Gradients are made in the copies' dtype and add up over micro-batches in fp32 (before PyTorch
    2.10 in the copies' dtype).

    Args:
        exchange: how gradients and weights are sent; by default as the numbers they are.
        bucket_bytes: a bucket is closed when it holds at least so much of the copies.

    Source: Rajbhandari et al., "ZeRO", SC 2020 (arXiv 1910.02054), section 5: stage 2.

    Raises:
        InputError: the layout is of another kind.
    """

    def __init__(
        self,
        ranks: Ranks,
        layout: Layout | None = None,
        exchange: ShardExchange | None = None,
        bucket_bytes: int = 25_000_000,
    ) -> None:
        super().__init__(ranks, layout or Layout.of(ranks.size, ranks.size, copies=True))
        if self.layout.replicas > 1:
            raise InputError(
                "optimizer state is cut over all ranks or none",
                field="parallel.shard",
                value=self.layout.shards,
                allowed=str(ranks.size),
            )
        self.exchange = exchange or ShardExchange(ExchangeContext(ranks))
        self.bucket_bytes, self.buckets = bucket_bytes, list[MasterBucket]()
        self._next = self._landed = 0
        self._handlers: list[Ready] = []
        self._masters: dict[int, nn.Parameter] = {}

    def start(self, model: nn.Module) -> None:
        """Give all ranks rank 0's weights, make masters of them, and listen for gradients.

        Raises:
            InputError: a trained parameter has no dimension along which it could be cut.
        """
        self.share(model)
        self.exchange.connect()
        for name, parameter in trainable(model):
            if not parameter.ndim:
                problem = "a trained scalar cannot be cut over ranks; give it the shape [1]"
                raise InputError(problem, field=name)
        cut = cut_buckets([p for _, p in trainable(model)], self.bucket_bytes)
        mesh = None
        if cut and not self.ranks.alone:
            mesh = self.layout.mesh(cut[0].parameters[0].device.type)
        for number, of_one_dtype in enumerate(cut):
            bucket = MasterBucket(f"bucket {number}", of_one_dtype.parameters, self.exchange, mesh)
            self.buckets.append(bucket)
            for index, parameter in enumerate(bucket.parameters):
                self._masters[id(parameter)] = bucket.masters[index]
                if parameter.dtype != torch.float32 and hasattr(parameter, "grad_dtype"):
                    parameter.grad_dtype = torch.float32
                ready = partial(self._ready, bucket, index)
                parameter.register_post_accumulate_grad_hook(ready)

    def trained(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """The masters, by the model's names."""
        return ((name, self._masters[id(p)]) for name, p in trainable(model))

    def register(self, registry: StateRegistry, model: nn.Module) -> None:
        """Register the masters as the model's weights, as any other strategy does its own.

        Where the exchange sends differences, copies are state of their own: the view `exchange`.
        Without it they begin at the masters.
        """
        view = model_view(model, masters=dict(self.trained(model)))

        def write(state: Mapping[str, Any]) -> None:
            view.write(state)
            self._spread(exactly=True)

        registry.add_view(replace(view, write=write))
        if self.exchange.stateful:
            registry.add_view(self._exchange_view(model))

    def _exchange_view(self, model: nn.Module) -> View:
        copies = {f"copy/{name}": parameter for name, parameter in trainable(model)}

        def read() -> dict[str, Any]:
            held = {key: parameter.detach() for key, parameter in copies.items()}
            return {**self.exchange.state_dict(), **held}

        @torch.no_grad()
        def write(state: Mapping[str, Any]) -> None:
            self.exchange.load_state_dict(state)
            for key, parameter in copies.items():
                if key in state:
                    parameter.copy_(whole(state[key]))
            if state.get("stale"):  # saved by a strategy that brings copies up when they are used
                self._spread(exactly=False)

        return View(EXCHANGE, read, write, like=copies.get)

    # Gradients

    def when_ready(self, model: nn.Module, handler: Ready) -> None:
        """Tell of a bucket's masters once the next bucket is on its way."""
        self._handlers.append(handler)

    def before_backward(self, *, last: bool) -> None:
        """Sum in the last backward pass of an update only: those before it add up here."""
        super().before_backward(last=last)
        self._next = self._landed = 0
        for bucket in self.buckets:
            bucket.clear()

    def _ready(self, bucket: MasterBucket, index: int, parameter: Tensor) -> None:
        if not self._last:
            return
        bucket.fill(index)
        while self._next < len(self.buckets) and self.buckets[self._next].complete:
            self._launch()

    def after_backward(self) -> None:
        """Launch what is left, and wait for all sums."""
        for bucket in self.buckets[self._next :]:
            bucket.fill_left()
            self._launch()
        self._land(len(self.buckets))
        super().after_backward()

    def _launch(self) -> None:
        """Send a bucket; then the one before it has had its time on the wire."""
        self.buckets[self._next].launch()
        self._next += 1
        self._land(self._next - 1)

    def _land(self, end: int) -> None:
        for bucket in self.buckets[self._landed : end]:
            bucket.land()
            self._landed += 1
            for handler in self._handlers:
                for master in bucket.masters:
                    if master.grad is not None:
                        handler(master)

    # Updates

    def updated(self) -> None:
        """Bring the copies to the masters, which are new."""
        self.exchange.advance()
        self._spread(exactly=False)

    def discard(self) -> None:
        """Forget gradients, of micro-batches too."""
        for bucket in self.buckets:
            bucket.clear()
            for tensor in (*bucket.parameters, *bucket.masters):
                tensor.grad = None

    @torch.no_grad()
    def _spread(self, *, exactly: bool) -> None:
        """Bring all copies to the masters, a bucket on the wire while the one before is stored."""
        waiting = deque[Callable[[], None]]()
        for bucket in self.buckets:
            waiting.append(partial(bucket.store, bucket.refresh(exactly=exactly)))
            if len(waiting) > 1:
                waiting.popleft()()
        while waiting:
            waiting.popleft()()
