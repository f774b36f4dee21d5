"""MARS: AdamW on gradients that are corrected by how they changed since the last step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from modicum.core.contracts.method import Against, Betas, Info, NonNegativeFloat, PositiveFloat
from modicum.core.contracts.search import LogRange, SearchChoice, SearchTable
from modicum.core.errors import InputError
from modicum.optim.base import MatrixOptimizer, fields_given
from modicum.optim.kept import KeptTensor
from modicum.optim.parts import OptimizerParts
from modicum.optim.rules import RowRange, SummingRule


@dataclass(frozen=True)
class CorrectedAdam(SummingRule):
    """Adam on C = G + gamma b1 / (1 - b1) (G - the last G), of norm 1 at most."""

    betas: tuple[float, float]
    epsilon: float
    gamma: float
    clips: bool = True
    over_all: bool = False
    copies: ClassVar[int] = 3

    def state(self, shape: tuple[int, ...]) -> dict[str, KeptTensor]:
        moments = {"exp_avg": KeptTensor(shape), "exp_avg_sq": KeptTensor(shape, squared=True)}
        return {**moments, "last_gradient": KeptTensor(shape)}

    def numbers(self, shape: tuple[int, ...]) -> int:
        return int(self.clips)

    def sums(
        self, gradient: Tensor, moments: Mapping[str, Tensor], age: int, rows: RowRange
    ) -> Tensor:
        if not self.clips:
            return gradient.new_zeros(0)
        return self._corrected(gradient, moments).square_().sum().view(1)

    def direction_by(
        self,
        gradient: Tensor,
        moments: Mapping[str, Tensor],
        age: int,
        rows: RowRange,
        sums: Tensor,
    ) -> tuple[Tensor, float]:
        mean, square, (first, second) = moments["exp_avg"], moments["exp_avg_sq"], self.betas
        corrected = self._corrected(gradient, moments)
        if self.clips:
            corrected.div_(sums.sqrt().clamp(min=1).view(()))
        mean.mul_(first).add_(corrected, alpha=1 - first)
        square.mul_(second).addcmul_(corrected, corrected, value=1 - second)
        moments["last_gradient"].copy_(gradient)
        root = torch.sqrt(square, out=corrected).div_(math.sqrt(1 - second**age))
        root.add_(self.epsilon)
        return torch.div(mean, root, out=root), 1 / (1 - first**age)

    def _corrected(self, gradient: Tensor, moments: Mapping[str, Tensor]) -> Tensor:
        first, _ = self.betas
        scale = self.gamma * first / (1 - first)
        return torch.sub(gradient, moments["last_gradient"]).mul_(scale).add_(gradient)


class MARS(MatrixOptimizer):
    """AdamW with variance reduction: momentum of gradients that are carried on along their change.

    C = G + gamma b1 / (1 - b1) (G - G'), G' being the last step's gradient, of another batch, and
    zero before the first; C is clipped to norm 1, and AdamW works on it. State is AdamW's and the
    last gradient: half as much again.

    Prefer it where the batch is small and memory is not the limit.

    Args:
        lr: the learning rate of groups that name none.
        betas: (b1, b2), the decay of the first and the second moment.
        gamma: the strength of the correction; with 0 and no clip it is AdamW.
        clip: what C's norm is taken of: each `tensor`, as in the authors' code, or `all` parameters
            together, as in the sweep; or `none`. For `all` every gradient must be known first.
        epsilon: is added to the corrected root of the second moment.
        weight_decay: of groups that name none; decoupled, before the update.
        in_backward: whether gradients are used up in the backward pass: the trainer does so, and in
            a loop of your own `step_in_backward(optimizer)`. Not with `clip="all"`.

    Raises:
        InputError: `clip="all"` together with `in_backward`.

    Source: Yuan et al., "MARS: Unleashing the Power of Variance Reduction for Training Large
    Models", arXiv 2411.10438, algorithm 2 in its approximate form (MARS-AdamW).

    >>> from modicum.optim import MARS
    >>> layer = torch.nn.Linear(4, 1)
    >>> optimizer = MARS(layer.parameters(), lr=1e-2)
    >>> layer(torch.ones(4)).sum().backward()
    >>> optimizer.step()
    >>> sorted(optimizer.state[layer.weight])
    ['exp_avg', 'exp_avg_sq', 'last_gradient', 'step']
    """

    info = Info(
        name="mars",
        title="MARS: AdamW with variance reduction",
        room="optim",
        paper="MARS: Unleashing the Power of Variance Reduction for Training Large Models, "
        "arXiv 2411.10438; compared in arXiv 2509.02046",
        claim="a lower loss than AdamW's at equal tokens; a few percent of the data where both "
        "are tuned alike",
        traits=("exact_resume", "compiles"),
        traits_if=(
            ("in_backward", True, "frees_gradient_in_backward"),
            ("clip", "all", "needs_global_norm_first"),
        ),
        evidence="against paper",
        claim_verdict="holds",
        against=Against("equal", "AdamW, tuned alike"),
        reason="its held-out loss is AdamW's within what seeds spread, at twice the learning "
        "rate: 0.95 of the data, 0.88 to 1.03",
        run_on_gpu=True,
        slot="optimizer",
        tiny={"weight_decay": 0.1},
    )
    search = SearchTable(
        {
            "betas": SearchChoice(((0.9, 0.95), (0.9, 0.99), (0.95, 0.99)), (0.95, 0.99)),
            "gamma": LogRange(5e-3, 0.1, 0.025),
        }
    )

    @fields_given
    def __init__(
        self,
        params: ParamsT,
        lr: PositiveFloat = 1e-3,
        *,
        betas: Betas = (0.95, 0.99),
        gamma: NonNegativeFloat = 0.025,
        clip: Literal["tensor", "all", "none"] = "tensor",
        epsilon: PositiveFloat = 1e-8,
        weight_decay: NonNegativeFloat = 0.0,
        in_backward: bool = False,
    ) -> None: ...

    @classmethod
    def parts_of(cls, value: Any) -> OptimizerParts:
        """One rule for all parameters."""
        if value.clip == "all" and value.in_backward:
            raise InputError(
                "a norm over all parameters is not known while gradients are used up in the "
                "backward pass; set clip to tensor",
                field="clip",
                value=value.clip,
            )
        clips, together = value.clip != "none", value.clip == "all"
        rule = CorrectedAdam(value.betas, value.epsilon, value.gamma, clips, together)
        return OptimizerParts.alike(rule)
