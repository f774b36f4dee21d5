"""Trion: of momentum the best columns in a cosine basis are orthogonalized, others carried over."""

from __future__ import annotations

import math
from typing import Any, Literal

from torch.optim.optimizer import ParamsT

from modicum.core.contracts.method import (
    Against,
    Betas,
    Info,
    NonNegativeFloat,
    OddQuintic,
    PositiveFloat,
    PositiveInt,
    Probability,
    Strings,
)
from modicum.core.contracts.search import IntegerRange, LogRange, SearchChoice, SearchTable
from modicum.optim.base import MatrixOptimizer, fields_given
from modicum.optim.carried import CarriedOver
from modicum.optim.dct import DCTProjector
from modicum.optim.orthogonal import NewtonSchulz
from modicum.optim.parts import OptimizerParts
from modicum.optim.rules import Adam, Unchanged


class Trion(MatrixOptimizer):
    """Muon in r columns of the DCT basis, with momentum as its error feedback.

    Of a matrix W [m, n], m >= n, the momentum takes up the gradient, M <- M + G; the r columns of
    M Q with the largest norms are L [m, r], and of these M loses (1 - mu) L Q_r^T. W loses
    lr f O Q_r^T, where O is L with its singular values brought near 1, and f a factor by the shape.
    So what is outside of the subspace does not decay until it is large enough to be chosen. Where
    m < n rows are chosen. All else is trained by Adam at `adam_rate` times the learning rate. State
    of a matrix: m n elements and r integers.

    Prefer it to Muon where matrices are so large that Newton-Schulz takes long: its products are
    those of m x r matrices. It is Dion with a fixed basis in place of a power iteration and QR. At
    r = n it is Muon without Nesterov's step. Sharded matrices have an owner each, which sends full
    updates.

    Args:
        lr: the learning rate of groups that name none, of the matrices.
        rank: r.
        momentum: mu.
        norm: by which columns are scored.
        transform: by FFT, or by a product with the basis, which takes n^2 m operations.
        steps, coefficients: of Newton-Schulz, see `modicum.optim.orthogonal`.
        product_dtype: of its products; `auto` is bf16 on an accelerator and fp32 on a CPU.
        shape_factor: `original` is f = sqrt(max(1, m / n)); `match_rms_adamw` is
            f = 0.2 sqrt(max(m, n)); `ratio` is f = sqrt(m / n).
        weight_decay: of groups that name none; decoupled, before the update.
        adam_rate: Adam's learning rate, times lr.
        adam_betas, adam_epsilon: Adam's.
        adam_decay: the weight decay of what Adam trains, times `weight_decay`.
        state_bits: 16 keeps momentum and moments in bf16.
        exclude: names of parameters to train by Adam, where names are known.
        in_backward: whether gradients are used up in the backward pass: the trainer does so, and in
            a loop of your own `step_in_backward(optimizer)`.

    Source: Modoranu et al., "SVD-Free Low-Rank Adaptive Gradient Optimization for Large Language
    Models", arXiv 2505.17967, algorithm 2; Ahn et al., "Dion", arXiv 2504.05295, algorithm 1.

    >>> import torch
    >>> from modicum.optim import Trion
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
    >>> optimizer = Trion(model.named_parameters(), lr=0.02, rank=4)
    >>> inputs = torch.randn(64, 8)
    >>> for _ in range(10):
    ...     loss = (model(inputs) - inputs).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> sorted(optimizer.state[model[0].weight])
    ['indices', 'momentum_buffer', 'step']
    """

    info = Info(
        name="trion",
        title="Trion: orthogonalized momentum in chosen columns of a cosine basis",
        room="optim",
        paper="SVD-Free Low-Rank Adaptive Gradient Optimization for Large Language Models, "
        "arXiv 2505.17967",
        claim="matches Dion, whose subspace comes of a power iteration and QR, faster and with "
        "less memory",
        traits=("exact_resume", "compiles"),
        traits_if=(("in_backward", True, "frees_gradient_in_backward"),),
        evidence="verified against code",
        claim_verdict="holds",
        against=Against("worse", "Muon"),
        reason="at GaLore's rank the loss is 1.3 % below GaLore's, at 0.08 of Muon's products; "
        "Muon's loss is 6 % lower",
        run_on_gpu=True,
        slot="optimizer",
        tiny={"rank": 3, "weight_decay": 0.1},
    )
    search = SearchTable(
        {
            "learning_rate": LogRange(1e-3, 3e-1, 0.016),
            "rank": IntegerRange(4, 1024, 128, log=True),
            "adam_rate": LogRange(0.02, 2.0, 0.2),
            "momentum": SearchChoice((0.9, 0.95, 0.98), 0.95),
        },
        size="rank",
    )

    @fields_given
    def __init__(
        self,
        params: ParamsT,
        lr: PositiveFloat = 0.016,
        *,
        rank: PositiveInt = 128,
        momentum: Probability = 0.95,
        norm: Literal[1, 2] = 1,
        transform: Literal["fft", "product"] = "fft",
        steps: PositiveInt = 5,
        coefficients: OddQuintic = (3.4445, -4.7750, 2.0315),
        product_dtype: Literal["auto", "fp32", "bf16"] = "auto",
        shape_factor: Literal["original", "match_rms_adamw", "ratio"] = "original",
        weight_decay: NonNegativeFloat = 0.0,
        adam_rate: PositiveFloat = 0.2,
        adam_betas: Betas = (0.8, 0.98),
        adam_epsilon: PositiveFloat = 1e-8,
        adam_decay: NonNegativeFloat = 1.0,
        state_bits: Literal[32, 16] = 32,
        exclude: Strings = ("*embed*", "*lm_head*", "*wte*", "*wpe*"),
        in_backward: bool = False,
    ) -> None: ...

    @classmethod
    def parts_of(cls, value: Any) -> OptimizerParts:
        """Momentum before the DCT's projector, Newton-Schulz within, Adam on all else."""
        return OptimizerParts(
            projector=DCTProjector(value.rank, value.norm, value.transform),
            carried=CarriedOver("momentum_buffer", value.momentum, value.state_bits),
            inner=Unchanged(),
            within=NewtonSchulz(value.steps, value.coefficients, value.product_dtype),
            shape_factor=_FACTORS[value.shape_factor],
            update_gap=1,
            rest=Adam(value.adam_betas, value.adam_epsilon, "outside_root"),
            rest_rate=value.adam_rate,
            rest_decay=value.adam_decay,
            bits=value.state_bits,
            exclude=value.exclude,
        )


_FACTORS = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "ratio": lambda rows, columns: math.sqrt(rows / columns),
}
