"""NAdamW: AdamW whose update looks one step of the momentum ahead."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from modicum.core.contracts.method import Against, Betas, Info, NonNegativeFloat, PositiveFloat
from modicum.core.contracts.search import SearchChoice, SearchTable
from modicum.optim.base import MatrixOptimizer, fields_given
from modicum.optim.parts import OptimizerParts
from modicum.optim.rules import Adam


@dataclass(frozen=True)
class NesterovAdam(Adam):
    """Adam with b1 M + (1 - b1) G in M's place, each part with its own bias correction."""

    copies: ClassVar[int] = 2

    def direction(
        self, gradient: Tensor, moments: Mapping[str, Tensor], age: int
    ) -> tuple[Tensor, float]:
        mean, square, (first, second) = moments["exp_avg"], moments["exp_avg_sq"], self.betas
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        root = square.sqrt().div_(math.sqrt(1 - second**age)).add_(self.epsilon)
        ahead = mean.mul(first / (1 - first ** (age + 1)))
        ahead.add_(gradient, alpha=(1 - first) / (1 - first**age))
        return torch.div(ahead, root, out=ahead), 1.0


class NAdamW(MatrixOptimizer):
    """AdamW with Nesterov's momentum: the update counts the gradient at hand once more.

    With M <- b1 M + (1 - b1) G and V <- b2 V + (1 - b2) G^2, W loses lr U / (sqrt(V') + epsilon),
    U = b1 M / (1 - b1^(t + 1)) + (1 - b1) G / (1 - b1^t), V' = V / (1 - b2^t). State is AdamW's.

    Prefer it to AdamW where tuning has a budget: it is as cheap, tunes alike, and is a little
    faster at the same settings in the comparison named below. `torch.optim.NAdam` warms its
    momentum up by a schedule of its own, so its updates are others.

    Args:
        lr: the learning rate of groups that name none.
        betas: (b1, b2), the decay of the first and the second moment.
        epsilon: is added to the corrected root of the second moment.
        weight_decay: of groups that name none; decoupled, before the update.
        in_backward: whether gradients are used up in the backward pass: the trainer does so, and in
            a loop of your own `step_in_backward(optimizer)`.

    Source: Dozat, "Incorporating Nesterov Momentum into Adam", ICLR 2016 workshop, algorithm 2 with
    a constant momentum, as in `optax.nadamw`.

    >>> from modicum.optim import NAdamW
    >>> layer = torch.nn.Linear(4, 1)
    >>> optimizer = NAdamW(layer.parameters(), lr=1e-2)
    >>> layer(torch.ones(4)).sum().backward()
    >>> optimizer.step()
    >>> sorted(optimizer.state[layer.weight])
    ['exp_avg', 'exp_avg_sq', 'step']
    """

    info = Info(
        name="nadamw",
        title="NAdamW: AdamW with Nesterov's momentum",
        room="optim",
        paper="Incorporating Nesterov Momentum into Adam, ICLR 2016 workshop; compared in "
        "arXiv 2509.02046",
        claim="not worse than AdamW, both tuned alike, and about as much faster as a few percent "
        "of the data",
        traits=("exact_resume", "compiles"),
        traits_if=(("in_backward", True, "frees_gradient_in_backward"),),
        evidence="against paper",
        claim_verdict="holds",
        against=Against("better", "AdamW, tuned alike"),
        run_on_gpu=True,
        slot="optimizer",
        tiny={"weight_decay": 0.1},
    )
    search = SearchTable(
        {"betas": SearchChoice(((0.9, 0.95), (0.95, 0.98), (0.9, 0.999)), (0.95, 0.98))}
    )

    @fields_given
    def __init__(
        self,
        params: ParamsT,
        lr: PositiveFloat = 1e-3,
        *,
        betas: Betas = (0.95, 0.98),
        epsilon: PositiveFloat = 1e-8,
        weight_decay: NonNegativeFloat = 0.0,
        in_backward: bool = False,
    ) -> None: ...

    @classmethod
    def parts_of(cls, value: Any) -> OptimizerParts:
        """One rule for all parameters."""
        return OptimizerParts.alike(NesterovAdam(value.betas, value.epsilon))
