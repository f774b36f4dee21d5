"""Data parallelism with weights, gradients and optimizer state sharded over ranks: PyTorch's FSDP2.

Blocks gather their weights when they compute; gradients are summed and sharded in one exchange.
With several replicas of the shards (hybrid sharding) that sum is then added up over the replicas.

An exchange of the room `comm` may sum gradients its own way, or carry weights too. Then it sends
how these differ from a copy that every rank holds, so that each rank holds all weights in addition
to its part of them, and a gather moves bytes only where the weights are newer than the copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from modicum.core.contracts.parameters import keeping_metadata
from modicum.core.contracts.state import StateRegistry, View, model_view
from modicum.core.contracts.strategy import Strategy
from modicum.core.errors import InputError
from modicum.core.ranks.collectives import Collectives
from modicum.core.ranks.exchange import ShardExchange
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.observed_calls import label_of, naming
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import whole
from modicum.parallel.buffer_rows import EXCHANGE, BufferRows, laid_out
from modicum.parallel.fsdp_wires import ExchangeWire, let_count, let_count_gathers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule


class Sharded(Strategy):
    """Every rank holds a part of each parameter, `layout.shards` of them all of it.

    Args:
        reshard_after_forward: whether a block gives its gathered weights back before its backward
            pass and gathers them again; if not, memory is taken for time.
        exchange: how gradients and weights are sent; None: as FSDP2 does, but that on a CPU
            gradients are summed by our own reduce-scatter.

    Attributes:
        engines: what has summed gradients on a CPU; they meter what this rank sends.

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
    ) -> None:
        super().__init__(ranks, layout)
        self.reshard_after_forward, self.exchange = reshard_after_forward, exchange
        self.engines: list[Collectives] = []
        self._groups: list[_Group] = []
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
            InputError: weights are quantized, and this PyTorch cannot shard integers.
        """
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

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
        for name in methods:
            register_fsdp_forward_method(model, name)
        if self.exchange is not None and not self.ranks.alone:
            self._connect(model, self.exchange)
            if self.exchange.leaves_weights and device.type == "cpu":
                let_count_gathers(_labelled(model), self.ranks)
        elif device.type == "cpu":
            self.engines = let_count(_labelled(model), self.ranks)

    def _connect(self, model: nn.Module, exchange: ShardExchange) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for number, module in enumerate(_sharded_modules(model)):
            if not hasattr(module, "set_custom_all_gather"):
                raise InputError(
                    "an exchange on FSDP2 needs a newer PyTorch", value=torch.__version__
                )
            shapes = {names[id(p)]: tuple(p.shape) for p in _own(cast(nn.Module, module))}
            if not shapes:
                continue
            group = _Group(f"group {number}", shapes, exchange)
            if not exchange.leaves_weights:
                self._groups.append(group)
                module.set_custom_all_gather(cast(Any, ExchangeWire(group.gather)))
            reduced = partial(self._reduced, group)
            module.set_custom_reduce_scatter(cast(Any, ExchangeWire(reduced)))

    def start(self, model: nn.Module) -> None:
        """Begin with a loaded model.

        Raises:
            InputError: there is an exchange, and parameters that are not trained.
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
            self.exchange.connect()
        self._trained = [parameter for _, parameter in self.trained(model)]

    def held(self) -> Iterator[Tensor]:
        """The copies that an exchange refreshes, once blocks were gathered."""
        return (group.copy for group in self._groups if group.copy is not None)

    def register(self, registry: StateRegistry, model: nn.Module) -> None:
        """Register the weights; where an exchange sends differences, its copies too.

        These are the view `exchange`. Without it they begin at the weights.
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
        self._micro_batch = 0 if first else self._micro_batch + 1

    def _reduced(self, group: _Group, gradients: Tensor) -> Tensor:
        """This rank's part of the sum, rounded anew in each pass."""
        rows = gradients.view(self.ranks.size, -1)
        with naming(group.label):
            return group.exchange.reduce_scatter(rows, f"{group.name}/{self._micro_batch}")()

    # Updates

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


class _Group:
    """What FSDP2 gathers at once, and the copy of it that every rank holds.

    Args:
        shapes: of its parameters by name, in FSDP2's order.
    """

    def __init__(
        self, name: str, shapes: Mapping[str, tuple[int, ...]], exchange: ShardExchange
    ) -> None:
        self.name, self.exchange = name, exchange
        self._names, self._rows = list(shapes), BufferRows(shapes.values(), exchange.ranks.size)
        self.label = label_of(self._names)
        self.copy: Tensor | None = None
        self.stale = False

    def gather(self, shard: Tensor) -> Tensor:
        """The copy [W, n], brought to this rank's row [n] of the weights, and the others', if new.

        The first time they are sent as they are.
        """
        with naming(self.label):
            if self.copy is None:
                assert len(shard) == self._rows.width, f"FSDP2 orders {self.name} in another way"
                self.copy = shard.new_empty(self._rows.shards, self._rows.width)
                self.exchange.spread(self.copy, shard)()
            elif self.stale:
                self.exchange.refresh(self.copy, shard, self.name)()
        self.stale = False
        return self.copy

    def read(self, mesh: DeviceMesh) -> dict[str, Any]:
        """The copy by parameter, of which each rank gives the rows that it owns."""
        if self.copy is None:
            return {}
        rank = self.exchange.ranks.rank
        return {
            f"copy/{name}": laid_out(
                self._rows.part(self.copy[rank], index, rank), self._rows.shapes[index], mesh
            )
            for index, name in enumerate(self._names)
        }

    def write(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Take the copy up, if there is one."""
        self.copy, self.stale = None, self.name in state.get("stale", ())
        if f"copy/{self._names[0]}" not in state:
            return
        for index, name in enumerate(self._names):
            value = whole(state[f"copy/{name}"])
            if self.copy is None:
                size = self._rows.shards, self._rows.width
                self.copy = torch.zeros(size, dtype=value.dtype, device=device)
            self._rows.put(self.copy, index, value)


def _own(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that FSDP2 gathers with a module, in its order: those of what is in it first.

    What is in a module that is gathered by itself is left out; a shared parameter comes twice.
    """
    from torch.distributed.fsdp import FSDPModule

    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own(child)
    yield from module.parameters(recurse=False)


def _labelled(model: nn.Module) -> list[tuple[str, FSDPModule]]:
    """What is gathered by itself, under the names that its calls are recorded by."""
    names = {id(module): name for name, module in model.named_modules()}
    found = _sharded_modules(model)
    return [(names[id(module)] or "outside blocks", module) for module in found]


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]
