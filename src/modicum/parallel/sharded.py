"""Data parallelism with weights, gradients and optimizer state sharded over ranks: PyTorch's FSDP2.

Blocks gather their weights when they compute; gradients are summed and sharded in one exchange.
With several replicas of the shards (hybrid sharding) that sum is then added up over the replicas.

An exchange of the room `comm` may sum gradients its own way, or carry weights too. Then it sends
how these differ from a copy that every rank holds, so that each rank holds all weights in addition
to its part of them, and a gather moves bytes only where the weights are newer than the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from modicum.core.clock import WIRE
from modicum.core.contracts.parameters import keeping_metadata, trainable
from modicum.core.contracts.state import StateRegistry, View, model_view
from modicum.core.contracts.strategy import Ready, Strategy
from modicum.core.errors import InputError
from modicum.core.ranks.exchange import ShardExchange
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.matrix_exchange import MatrixExchange
from modicum.core.ranks.observed_calls import label_of, naming
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sent_kinds import refuse_complex
from modicum.core.torch_private import forget_partial_sums
from modicum.parallel.buffer_rows import EXCHANGE
from modicum.parallel.fsdp_wires import (
    Engines,
    ExchangeWire,
    SummingWire,
    SumOnTheWire,
    let_gather,
    let_sum,
)
from modicum.parallel.laid_aside import LaidAside
from modicum.parallel.sharded_groups import CopiedGroup, own_parameters, shapes_of_groups
from modicum.parallel.sharded_matrices import HostsGroup, MatrixGroup

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class Sharded(Strategy):
    """Every rank holds a part of each parameter, `layout.shards` of them all of it.

    Ranks may use different parameters of a block. What no rank used has a gradient of zeros, where
    `Replicated` and `Zero` leave none: an optimizer decays it, and moves it by its momentum. Which
    were used is not asked, as that would take a message in every update.

    Args:
        reshard_after_forward: whether a block gives its gathered weights back before its backward
            pass and gathers them again; if not, memory is taken for time.
        exchange: how gradients and weights are sent; None: as FSDP2 does, but that on a CPU
            gradients are summed by our own reduce-scatter.
        matrices: sums gradients instead, as full matrices, once an update: before its last backward
            pass they add up on each rank in full.

    Attributes:
        engines: what FSDP2's gathers and sums go by on a CPU; they meter what this rank sends.

    Source: Zhao et al., "PyTorch FSDP", VLDB 2023 (arXiv 2304.11277); `fully_shard`.

    Raises:
        InputError: the exchange cannot be used so.
    """

    def __init__(
        self,
        ranks: Ranks,
        layout: Layout,
        reshard_after_forward: bool = True,
        exchange: ShardExchange | None = None,
        matrices: MatrixExchange | None = None,
    ) -> None:
        super().__init__(ranks, layout)
        self.reshard_after_forward, self.exchange = reshard_after_forward, exchange
        self.matrices, self._matrix_groups = matrices, list[MatrixGroup | HostsGroup]()
        self._modules: list[FSDPModule] = []
        self.engines = Engines(ranks)
        self._aside = LaidAside(layout.replicas)
        self._sum = SumOnTheWire(self._aside)
        self._groups: list[CopiedGroup] = []
        self._trained: list[nn.Parameter] = []
        self._micro_batch = 0
        codes = exchange is not None and not exchange.leaves_weights
        if codes and reshard_after_forward:
            raise InputError(
                "an exchange that codes weights keeps a copy of all of them, so giving gathered "
                "ones back before the backward pass saves nothing; set it to false",
                field="parallel.reshard_after_forward",
                value=True,
            )
        if exchange is not None and layout.replicas > 1:
            raise InputError(
                "an exchange that codes gradients sums them over all ranks at once; "
                "shard the weights over all of them",
                field="parallel.shard",
                value=layout.shards,
                allowed=str(ranks.size),
            )

    def cut(
        self,
        model: nn.Module,
        blocks: Iterable[nn.Module],
        device: torch.device,
        methods: Iterable[str] = (),
    ) -> None:
        """Shard every parameter along dimension 0; the model itself holds what no block does.

        Raises:
            InputError: weights are quantized, and this PyTorch cannot shard integers; or one has no
                dimension along which it could be sharded.
        """
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        _refuse_scalars(model)
        quantized = not all(parameter.is_floating_point() for parameter in model.parameters())
        if quantized and torch.__version__ < "2.12":  # it asks for gradients of every parameter
            raise InputError(
                "PyTorch cannot shard quantized weights before 2.12; install a newer one, or let "
                "every rank hold all weights",
                field="parallel.strategy",
                value="fsdp",
                allowed="ddp",
            )
        mesh = self.layout.mesh(device.type)
        with keeping_metadata(model):
            for block in blocks:
                fully_shard(block, mesh=mesh, reshard_after_forward=self.reshard_after_forward)
            # What is used first and last stays gathered from the forward to the backward pass.
            fully_shard(model, mesh=mesh, reshard_after_forward=False)
        for module in _sharded_modules(model):
            module.set_gradient_divide_factor(1.0)
            # Else a factor is applied to the gradients before they are summed.
            module.set_force_sum_reduction_for_comms(True)
            # Else FSDP2 sends the gradients that a rank has, and those of others do not match them.
            if not self.ranks.alone and hasattr(module, "set_reduce_scatter_unused_params"):
                module.set_reduce_scatter_unused_params(True, recurse=False)
        for name in methods:
            register_fsdp_forward_method(model, name)
        self._modules = _sharded_modules(model)
        if self.matrices is not None and not self.ranks.alone:
            self._connect_matrices(model, self.matrices)
            if device.type == "cpu":
                let_gather(_labelled(model), self.engines)
        elif self.exchange is not None and not self.ranks.alone:
            self._connect(model, self.exchange)
            if self.exchange.leaves_weights and device.type == "cpu":
                let_gather(_labelled(model), self.engines)
        elif device.type == "cpu":
            let_gather(_labelled(model), self.engines)
            let_sum(_labelled(model), self.engines, self.ranks, self._sum)

    def _connect(self, model: nn.Module, exchange: ShardExchange) -> None:
        labels = {module: label for label, module in _labelled(model)}
        for number, (module, shapes) in enumerate(shapes_of_groups(model, self._modules)):
            group = CopiedGroup(f"group {number}", shapes, exchange)
            if not exchange.leaves_weights:
                self._groups.append(group)
                module.set_custom_all_gather(cast(Any, ExchangeWire(group.gather)))
            begin = partial(self._reduced, group)
            wire = SummingWire(self.ranks.clock, begin, self._sum, labels[module])
            module.set_custom_reduce_scatter(cast(Any, wire))

    def _connect_matrices(self, model: nn.Module, exchange: MatrixExchange) -> None:
        trained = {name for name, _ in trainable(model)}
        labels = {module: label for label, module in _labelled(model)}
        for module, shapes in shapes_of_groups(model, self._modules):
            own = {name: shape for name, shape in shapes.items() if name in trained}
            group: MatrixGroup | HostsGroup
            if self.layout.replicas > 1:
                label = label_of(list(shapes))
                group = HostsGroup(label, own, exchange, self.engines, self.layout)
                module.set_requires_all_reduce(False, recurse=False)
            else:
                lay = partial(self._aside.lay, labels[module])
                land = partial(self._aside.add, labels[module])
                group = MatrixGroup(label_of(list(shapes)), own, exchange, lay, land)
            self._matrix_groups.append(group)
            module.set_custom_reduce_scatter(cast(Any, group))

    def start(self, model: nn.Module) -> None:
        """Begin with a loaded model.

        Raises:
            InputError: there is an exchange of weights, and parameters that are not trained; or a
                trained one that an exchange does not take.
        """
        frozen = next((n for n, p in model.named_parameters() if not p.requires_grad), None)
        if self._groups and frozen is not None:
            raise InputError(
                "an exchange on FSDP2 would send frozen weights too; shard the optimizer's state "
                "alone, and only what is trained is sent",
                field="parallel.shard",
                value=frozen,
            )
        super().start(model)
        if self.exchange is not None:
            refuse_complex(self.trained(model))
        if self.matrices is not None:
            self.matrices.check(self.trained(model))
        for exchange in (self.exchange, self.matrices):
            if exchange is not None:
                exchange.connect()
        self._trained = [parameter for _, parameter in self.trained(model)]
        named = dict(model.named_parameters())
        for group in self._matrix_groups:
            if isinstance(group, HostsGroup):
                group.parameters = [named[name] for name in group.names]
        trained = set(self._trained)
        for label, module in _labelled(model):
            own = own_parameters(cast(nn.Module, module))
            self._aside.follow(label, (p for p in dict.fromkeys(own) if p in trained))
        # Between hosts FSDP2 sums what a sum within a host has given at once.
        on_cpu = all(parameter.device.type == "cpu" for parameter in self._trained)
        self._sum.waits = not on_cpu or self.layout.replicas > 1

    def held(self) -> Iterator[Tensor]:
        """The copies that an exchange refreshes, once blocks were gathered; what one owes."""
        yield from (group.copy for group in self._groups if group.copy is not None)
        if self.matrices is not None:
            yield from self.matrices.held()

    def register(self, registry: StateRegistry, model: nn.Module) -> None:
        """Register the weights; where an exchange sends differences, its copies too.

        These are the view `exchange`. Without it they begin at the weights. An exchange of matrices
        adds what it owes.
        """
        view = model_view(model)

        def write(state: Mapping[str, Any]) -> None:
            view.write(state)
            for group in self._groups:
                group.copy = None

        registry.add_view(replace(view, write=write))
        if self._groups and self.exchange is not None and self.exchange.stateful:
            device = next(model.parameters()).device
            registry.add_view(self._exchange_view(self.exchange, device))
        for each in [] if self.matrices is None else self.matrices.views():
            registry.add_view(each)

    def _exchange_view(self, exchange: ShardExchange, device: torch.device) -> View:
        mesh = self.layout.mesh(device.type)

        def read() -> dict[str, Any]:
            stale = [group.name for group in self._groups if group.stale]
            state = exchange.state_dict() | {"stale": stale}
            for group in self._groups:
                state |= group.read(mesh)
            return state

        def write(state: Mapping[str, Any]) -> None:
            exchange.load_state_dict(state)
            for group in self._groups:
                group.write(state, device)

        return View(EXCHANGE, read, write)

    # Gradients

    def before_backward(self, *, last: bool) -> None:
        """Count the backward passes of an update, in each of which gradients are summed."""
        super().before_backward(last=last)
        first = all(parameter.grad is None for parameter in self._trained)
        if first:
            self._aside.clear()  # somebody has let go of all gradients, as after a rehearsal
        self._sum.land()
        self._micro_batch = 0 if first else self._micro_batch + 1
        if self.matrices is not None:
            self.matrices.discard()  # of an update that was interrupted
            for parameter in self._trained if self.layout.replicas == 1 else ():
                if parameter not in self._aside.read:
                    parameter.grad = None  # what is added up is in the groups
            for group in self._matrix_groups:
                group.before(last=last)
                if first:
                    group.clear()

    def after_backward(self) -> None:
        """Wait for the sums that are on the wire."""
        self._sum.land()
        if self.matrices is not None:
            with self.ranks.clock(WIRE):
                self.matrices.turn()
                for group in self._matrix_groups:
                    group.land()
            for module in self._modules if self.layout.replicas > 1 else ():
                forget_partial_sums(module)
        super().after_backward()

    def when_ready(self, model: nn.Module, handler: Ready) -> None:
        """Have `handler` called as FSDP2 sums.

        Raises:
            InputError: an exchange sums matrices, which have landed after the backward pass alone.
        """
        if self.matrices is not None:
            raise InputError(
                "sums of matrices are there when the backward pass is over, so updates cannot be "
                "made in it",
                field="comm.method",
            )
        self._sum.waits = True
        super().when_ready(model, handler)

    def _reduced(self, group: CopiedGroup, gradients: Tensor, _: Any) -> Callable[[], Tensor]:
        """This rank's part of the sum, rounded anew in each pass."""
        rows = gradients.view(self.ranks.size, -1)
        with naming(group.label):
            return group.exchange.reduce_scatter(rows, f"{group.name}/{self._micro_batch}")

    # Updates

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the weights; only now is it owed what was left of the gradients."""
        super().update(optimizer)
        if self.matrices is not None:
            self.matrices.commit()

    def discard(self) -> None:
        """Forget the gradients; what is owed stays as it was."""
        super().discard()
        if self.matrices is not None:
            self.matrices.discard()

    def updated(self) -> None:
        """Weights are new, which the next gather of each finds."""
        if self.exchange is not None:
            self.exchange.advance()
        for group in self._groups:
            group.stale = True

    def rest(self, model: nn.Module) -> None:
        """Give gathered weights back, so that parameters are the sharded ones again."""
        for module in _sharded_modules(model):
            module.reshard()


def _refuse_scalars(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.ndim:
            problem = "a scalar cannot be sharded over ranks; give it the shape [1]"
            raise InputError(problem, field=name)


def _labelled(model: nn.Module) -> list[tuple[str, FSDPModule]]:
    """What is gathered by itself, under the names that its calls are recorded by."""
    names = {id(module): name for name, module in model.named_modules()}
    found = _sharded_modules(model)
    return [(names[id(module)] or "outside blocks", module) for module in found]


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]
