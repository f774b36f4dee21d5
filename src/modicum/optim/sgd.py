"""SGD: PyTorch's own, with momentum, as a method that recipes can name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from modicum.core.contracts.ledger import Entry, Ledger, OptimizerQuery
from modicum.core.contracts.method import (
    Against,
    Info,
    NonNegativeFloat,
    PositiveFloat,
    Probability,
)
from modicum.core.contracts.optimizers import OptimizerMethod
from modicum.core.contracts.search import LogRange, SearchChoice, SearchTable
from modicum.optim.ledger import elementwise, local_elements
from modicum.optim.with_gradients import TorchStep


class SGD(TorchStep, torch.optim.SGD):
    """Stochastic gradient descent with momentum: one moment, or none at all.

    Prefer it where the gradient is preconditioned already, and for convolutional networks. This is
    `torch.optim.SGD`; its weight decay is not decoupled, it goes through the momentum. Where
    there is neither, gradients may be sparse.

    Args:
        lr: the learning rate of groups that name none.
        momentum: mu, the decay of the moment M <- mu M + G; with 0 there is no state.
        nesterov: whether a step follows G + mu M instead of M.
        weight_decay: of groups that name none; it adds weight_decay W to the gradient.

    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning",
    ICML 2013, section 2, with the learning rate outside of M, as in PyTorch.

    >>> from modicum.optim import SGD
    >>> layer = torch.nn.Linear(4, 1)
    >>> optimizer = SGD(layer.parameters(), lr=1e-2, momentum=0.9)
    >>> layer(torch.ones(4)).sum().backward()
    >>> optimizer.step()
    >>> list(optimizer.state[layer.weight])
    ['momentum_buffer']
    """

    info = Info(
        name="sgd",
        title="SGD: stochastic gradient descent with momentum",
        room="optim",
        paper="On the importance of initialization and momentum in deep learning, ICML 2013",
        claim="with a good start and a schedule, momentum trains deep networks as well as "
        "second-order methods",
        traits=("exact_resume", "compiles"),
        evidence="verified against code",
        against=Against("baseline"),
        run_on_gpu=True,
        slot="optimizer",
        tiny={"weight_decay": 0.1},
    )
    keeps = ("momentum_buffer",)
    search = SearchTable(
        {
            "learning_rate": LogRange(1e-4, 1.0, 1e-2),
            "momentum": SearchChoice((0.0, 0.9, 0.95, 0.99), 0.9),
        }
    )

    def __init__(
        self,
        params: ParamsT,
        lr: PositiveFloat = 1e-2,
        *,
        momentum: Probability = 0.9,
        nesterov: bool = False,
        weight_decay: NonNegativeFloat = 0.0,
    ) -> None:
        # One parameter at a time: the form for lists makes copies of all gradients at once.
        super().__init__(
            params,
            lr,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            foreach=False,
        )

    def takes_sparse(self, group: Mapping[str, Any]) -> bool:
        """Where nothing but the gradient itself is taken off the weights."""
        return not group["momentum"] and not group["weight_decay"]

    @staticmethod
    def spends(value: OptimizerMethod, at: OptimizerQuery) -> Ledger:
        """One moment where there is momentum, and in a step two copies of one gradient at most."""
        fields: dict[str, Any] = value.fields()
        moments = 1 if fields["momentum"] else 0
        held = [local_elements(p, 0, at.shards) * p.element_bytes for p in at.parameters]
        copies = bool(fields["weight_decay"]) + bool(fields["nesterov"])
        scratch = Entry("workspace", copies * max(held, default=0), ("step",), "of a gradient")
        ledger = elementwise(at, moments=moments, counter=False, what="momentum")
        return ledger + Ledger.of(scratch)
