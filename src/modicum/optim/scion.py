"""Scion: a step of one size in each layer's own norm, spectral for matrices, signs for all else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.optim.optimizer import ParamsT

from modicum.core.contracts.ledger import TrainedParameter
from modicum.core.contracts.method import (
    Against,
    Info,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Probability,
    Strings,
)
from modicum.core.contracts.search import LogRange, SearchChoice, SearchTable
from modicum.optim.base import MatrixOptimizer, fields_given
from modicum.optim.kept import KeptTensor
from modicum.optim.orthogonal import NewtonSchulz
from modicum.optim.parts import OptimizerParts
from modicum.optim.projectors import FullSpace
from modicum.optim.rules import AveragedMomentum, UpdateRule


@dataclass(frozen=True)
class SignOfMomentum:
    """B <- b B + (1 - b) G, and sign(B) is the direction, 0 where B is; times `scale`."""

    beta: float
    scale: float = 1.0

    def state(self, shape: tuple[int, ...]) -> dict[str, KeptTensor]:
        return {"momentum_buffer": KeptTensor(shape)}

    def direction(
        self, gradient: Tensor, moments: Mapping[str, Tensor], age: int
    ) -> tuple[Tensor, float]:
        return moments["momentum_buffer"].lerp_(gradient, 1 - self.beta).sign(), self.scale


class Scion(MatrixOptimizer):
    """Momentum to the nearest orthogonal matrix, or to signs: linear minimization over norm balls.

    Of a matrix W [m, n], B <- mu B + (1 - mu) G, and W loses lr f O, O being B with its singular
    values brought near 1 by Newton-Schulz. Embeddings, output head, vectors and convolutions lose
    lr r sign(B). State is one moment of each parameter, half of AdamW's, and nothing is divided by
    a second one.

    Prefer it to Muon where no part shall need Adam: one learning rate and half of the state for all
    parameters. A step costs as much as Muon's.

    Args:
        lr: the learning rate of groups that name none.
        momentum: mu, of matrices.
        sign_beta: that of all else.
        factors: `sweep` has f = sqrt(max(1, m / n)) and r = `sign_rate`, as in the comparison named
            below; `paper` has f = `matrix_radius` sqrt(m / n) and r = `sign_radius`, for tables
            [m, n] over n, the balls of the paper.
        sign_rate, matrix_radius, sign_radius: see `factors`.
        steps: of Newton-Schulz, see `modicum.optim.orthogonal`.
        product_dtype: of its products; `auto` is bf16 on an accelerator and fp32 on a CPU.
        weight_decay: of groups that name none; decoupled, before the update. With 1 and the
            factors of the paper weights stay in their balls: the paper's constrained form.
        exclude: names of parameters to update by signs, where names are known.
        in_backward: whether gradients are used up in the backward pass: the trainer does so, and in
            a loop of your own `step_in_backward(optimizer)`.

    Source: Pethick et al., "Training Deep Learning Models with Norm-Constrained LMOs", arXiv
    2502.07529, algorithms 1 and 2 with the spectral and the sign norm; the sweep's factors as in
    Wen et al., arXiv 2509.02046.

    >>> import torch
    >>> from modicum.optim import Scion
    >>> layer = torch.nn.Linear(3, 3)
    >>> optimizer = Scion(layer.parameters(), lr=0.1)
    >>> before = layer.bias.detach().clone()
    >>> layer(torch.eye(3)).sum().backward()
    >>> optimizer.step()
    >>> [round(value, 3) for value in (before - layer.bias.detach()).tolist()]
    [0.02, 0.02, 0.02]
    """

    info = Info(
        name="scion",
        title="Scion: steps of one size in the spectral norm, or of signs",
        room="optim",
        paper="Training Deep Learning Models with Norm-Constrained LMOs, arXiv 2502.07529; "
        "compared in arXiv 2509.02046",
        claim="less data than AdamW, as Muon, with half of the state for all parameters",
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
        {
            "learning_rate": LogRange(1e-3, 3e-1, 0.016),
            "sign_rate": LogRange(0.02, 2.0, 0.2),
            "momentum": SearchChoice((0.8, 0.9, 0.95), 0.9),
        }
    )

    @fields_given
    def __init__(
        self,
        params: ParamsT,
        lr: PositiveFloat = 0.016,
        *,
        momentum: Probability = 0.9,
        sign_beta: Probability = 0.95,
        factors: Literal["sweep", "paper"] = "sweep",
        sign_rate: PositiveFloat = 0.2,
        matrix_radius: PositiveFloat = 50.0,
        sign_radius: PositiveFloat = 3000.0,
        steps: PositiveInt = 5,
        product_dtype: Literal["auto", "fp32", "bf16"] = "auto",
        weight_decay: NonNegativeFloat = 0.0,
        exclude: Strings = ("*embed*", "*lm_head*", "*wte*", "*wpe*"),
        in_backward: bool = False,
    ) -> None: ...

    @classmethod
    def parts_of(cls, value: Any) -> OptimizerParts:
        """Momentum and Newton-Schulz on full matrices, signs of momentum on all else."""
        paper, radius = value.factors == "paper", value.matrix_radius

        def in_ball(rows: int, columns: int) -> float:
            return float(radius * math.sqrt(rows / columns))

        def rule_of(parameter: TrainedParameter) -> UpdateRule:
            if not paper:
                return SignOfMomentum(value.sign_beta, value.sign_rate)
            inputs = math.prod(parameter.shape[1:])
            return SignOfMomentum(value.sign_beta, value.sign_radius / max(1, inputs))

        return OptimizerParts(
            projector=FullSpace(),
            inner=AveragedMomentum(value.momentum),
            finish=NewtonSchulz(value.steps, dtype=value.product_dtype),
            shape_factor=in_ball if paper else _at_least_one,
            rest=SignOfMomentum(value.sign_beta),
            exclude=value.exclude,
            rule_of=rule_of,
        )


def _at_least_one(rows: int, columns: int) -> float:
    return math.sqrt(max(1.0, rows / columns))
