"""One rank of a run whose recipe has an exchange: nothing travels, and what it keeps is kept."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from modicum.core.contracts.parameters import trainable
from modicum.core.contracts.state import StateRegistry, View
from modicum.core.contracts.strategy import Ready, Strategy
from modicum.core.ranks.exchange import ShardExchange
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.matrix_exchange import MatrixExchange
from modicum.core.ranks.ranks import Ranks
from modicum.parallel.buffer_rows import EXCHANGE


class AloneWithMatrices(Strategy):
    """A process alone that pays what several ranks owed, and takes it no further.

    What they owe when one replaces them becomes a part of its first update's gradients. Until
    then it takes memory that a plan of one rank does not count.

    Args:
        matrices: bound to this rank; its state is in checkpoints, as several ranks take it up.
    """

    def __init__(self, ranks: Ranks, layout: Layout, matrices: MatrixExchange) -> None:
        super().__init__(ranks, layout)
        self.matrices = matrices
        self._names: dict[int, str] = {}
        self._parameters: list[nn.Parameter] = []
        self._paid: set[str] = set()

    def start(self, model: nn.Module) -> None:
        """Begin with a loaded model."""
        super().start(model)
        self._names = {id(parameter): name for name, parameter in trainable(model)}
        self._parameters = [parameter for _, parameter in trainable(model)]

    def held(self) -> Iterable[Tensor]:
        """What is owed still."""
        return self.matrices.held()

    def register(self, registry: StateRegistry, model: nn.Module) -> None:
        """Register the weights, and what is owed."""
        super().register(registry, model)
        for view in self.matrices.views():
            registry.add_view(view)

    def when_ready(self, model: nn.Module, handler: Ready) -> None:
        """Have `handler` called with each gradient, what is owed of it included."""

        def ready(parameter: nn.Parameter) -> None:
            self._pay(parameter)
            handler(parameter)

        super().when_ready(model, ready)

    def before_backward(self, *, last: bool) -> None:
        """What an update that was interrupted has paid is owed still."""
        super().before_backward(last=last)
        self.matrices.discard()
        self._paid.clear()

    def after_backward(self) -> None:
        """Add what is owed to the gradients that there are."""
        super().after_backward()
        for parameter in self._parameters:
            self._pay(parameter)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the weights; what was paid is owed no more."""
        super().update(optimizer)
        self.matrices.commit()
        self._paid.clear()

    def discard(self) -> None:
        """Forget the gradients; what is owed stays as it was."""
        super().discard()
        self.matrices.discard()
        self._paid.clear()

    def _pay(self, parameter: nn.Parameter) -> None:
        name = self._names[id(parameter)]
        if parameter.grad is not None and name not in self._paid:
            self.matrices.pay(name, parameter.grad)
            self._paid.add(name)


class AloneWithRows(Strategy):
    """A process alone that counts its updates as an exchange of rows does, for several ranks.

    Copies of weights are none of its state: others begin at the weights.

    Args:
        exchange: bound to this rank.
    """

    def __init__(self, ranks: Ranks, layout: Layout, exchange: ShardExchange) -> None:
        super().__init__(ranks, layout)
        self.exchange = exchange

    def register(self, registry: StateRegistry, model: nn.Module) -> None:
        """Register the weights, and the number of updates."""
        super().register(registry, model)
        registry.add_view(View(EXCHANGE, self.exchange.state_dict, self.exchange.load_state_dict))

    def updated(self) -> None:
        """Count an update."""
        self.exchange.advance()
