"""Data parallelism with the optimizer's state sharded over ranks, and a full model on each: ZeRO.

Every rank computes with a full copy of the model, in the model's dtype. What is trained are
*masters*: fp32 parameters of which each rank holds some rows, as DTensors sharded along dimension
0, so that optimizers and checkpoints see what they see under FSDP2. Gradients are summed to their
owners while the backward pass runs; after an update the owners' new weights go into all copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from modicum.core.contracts.parameters import trainable
from modicum.core.contracts.state import StateRegistry, View, model_view
from modicum.core.errors import InputError
from modicum.core.ranks.bucketed import Bucketed
from modicum.core.ranks.exchange import ExchangeContext, ShardExchange
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.matrix_exchange import MatrixExchange
from modicum.core.ranks.observed_calls import label_of
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sent_kinds import refuse_complex
from modicum.core.ranks.sharding import whole
from modicum.parallel.buffer_rows import EXCHANGE
from modicum.parallel.masters import MasterBucket
from modicum.parallel.matrix_buckets import MatrixMasterBucket

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Zero(Bucketed[MasterBucket]):
    """A full model on each rank; masters, gradients and optimizer state sharded over the ranks.

    Next to `Replicated` it saves the optimizer's state, and sends as much; next to FSDP2 it holds
    all weights, and gathers them once an update, whatever the number of micro-batches.

    Gradients are made in the copies' dtype and add up over micro-batches in fp32 (before PyTorch
    2.10 in the copies' dtype).

    Args:
        exchange: how gradients and weights are sent; by default as the numbers they are.
        bucket_bytes: a bucket is closed when it holds at least so much of the copies.
        matrices: sums the gradients instead; each owner takes its rows of the sums.

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
        matrices: MatrixExchange | None = None,
    ) -> None:
        layout = layout or Layout.of(ranks.size, ranks.size, copies=True)
        super().__init__(ranks, layout, bucket_bytes, matrices)
        if self.layout.replicas > 1:
            raise InputError(
                "optimizer state is sharded over all ranks or none",
                field="parallel.shard",
                value=self.layout.shards,
                allowed=str(ranks.size),
            )
        self.exchange = exchange or ShardExchange(ExchangeContext(ranks))
        self._masters: dict[int, nn.Parameter] = {}
        self._mesh: DeviceMesh | None = None

    def start(self, model: nn.Module) -> None:
        """Give all ranks rank 0's weights, make masters of them, and listen for gradients.

        Raises:
            InputError: a trained parameter has no dimension along which it could be sharded, or is
                complex, as no master is.
        """
        self.exchange.connect()
        refuse_complex(trainable(model))
        for name, parameter in trainable(model):
            if not parameter.ndim:
                problem = "a trained scalar cannot be sharded over ranks; give it the shape [1]"
                raise InputError(problem, field=name)
        trained = [parameter for _, parameter in trainable(model)]
        if trained and not self.ranks.alone:
            self._mesh = self.layout.mesh(trained[0].device.type)
        super().start(model)

    def _bucket(self, parameters: Sequence[nn.Parameter], names: Sequence[str]) -> MasterBucket:
        name, exchange, mesh = f"bucket {len(self.buckets)}", self.exchange, self._mesh
        if self.matrices is None:
            bucket = MasterBucket(name, parameters, exchange, mesh)
        else:
            bucket = MatrixMasterBucket(name, parameters, exchange, mesh, names, self.matrices)
        bucket.label = label_of(names)
        for parameter, master in zip(parameters, bucket.masters, strict=True):
            self._masters[id(parameter)] = master
            if parameter.dtype != torch.float32:
                parameter.grad_dtype = torch.float32
        return bucket

    def trained(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """The masters, by the model's names."""
        return ((name, self._masters[id(p)]) for name, p in trainable(model))

    def held(self) -> Iterator[Tensor]:
        """The masters, and what an exchange of gradients owes."""
        yield from self._masters.values()
        if self.matrices is not None:
            yield from self.matrices.held()

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
        for each in self._matrix_views():
            registry.add_view(each)

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

    @property
    def _lands_early(self) -> bool:
        # Of what a matrix exchange has sent, gradients take no memory any more.
        return self.matrices is None

    # Updates

    def updated(self) -> None:
        """Bring the copies to the masters, which are new."""
        self.exchange.advance()
        self._spread(exactly=False)

    def discard(self) -> None:
        """Forget gradients, of micro-batches too; what is owed stays as it was."""
        super().discard()
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
