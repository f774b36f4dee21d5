"""DCT-AdamW: Adam in the best columns of a fixed cosine basis, chosen anew every step."""

from __future__ import annotations

from typing import Any, Literal

from torch.optim.optimizer import ParamsT

from modicum.core.contracts.method import (
    Against,
    Betas,
    Info,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Strings,
)
from modicum.core.contracts.search import IntegerRange, LogRange, SearchTable
from modicum.optim.base import MatrixOptimizer, fields_given
from modicum.optim.carried import CarriedOver
from modicum.optim.dct import DCTProjector
from modicum.optim.parts import OptimizerParts
from modicum.optim.rules import Adam


class DCTAdamW(MatrixOptimizer):
    """Adam in r columns of the DCT basis of a matrix's smaller dimension.

    Of a matrix W [m, n], m >= n, the rows of the gradient are transformed, S = G Q, and the r
    columns of S with the largest norms are the projected gradient [m, r]; where m < n the same of
    columns. All layers of a width share one basis, so a matrix keeps r integers instead of
    n r: its state is 2 m r elements and r numbers. A transform by FFT takes m n log n operations,
    which is little enough for a new subspace every step. Moments move with the columns that stay,
    and begin at zero in new ones.

    Prefer it to GaLore where SVDs take long, or the subspace should follow the gradient. The basis
    knows nothing of the model: of a gradient of low rank it has less than the SVD of that rank.
    With `feedback_bits` what is outside of the subspace is added to the next gradient, which takes
    m n codes, more than all else at small r.

    Args:
        lr: the learning rate of groups that name none.
        rank: r.
        update_gap: steps from one choice of columns to the next.
        norm: by which columns are scored.
        on_refresh: what becomes of moments when the choice changes: `rotate` moves them with their
            columns, `keep` leaves them where they are, `reset` begins anew.
        feedback_bits: of an element of what is carried over, codes of 4 or 8 by row, bf16 or fp32;
            0: nothing is.
        transform: by FFT, or by a product with the basis, which takes n^2 m operations.
        largest: matrices with a dimension of so many are trained by plain AdamW.
        state_bits: 16 keeps all moments in bf16; 8 keeps those in the subspace in blocks of 8 bits.
        betas, epsilon: Adam's; epsilon is added to the corrected root, as in `torch.optim.AdamW`.
        weight_decay: of groups that name none; decoupled, before the update.
        exclude: names of parameters to train by plain AdamW, where names are known.
        in_backward: whether gradients are used up in the backward pass: the trainer does so, and in
            a loop of your own `step_in_backward(optimizer)`.

    Source: Modoranu et al., "SVD-Free Low-Rank Adaptive Gradient Optimization for Large Language
    Models", arXiv 2505.17967, algorithm 1; details as in the authors' `ista-daslab-optimizers`.

    >>> import torch
    >>> from modicum.optim import DCTAdamW
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 1))
    >>> optimizer = DCTAdamW(model.named_parameters(), lr=1e-2, rank=4)
    >>> inputs = torch.randn(64, 16)
    >>> for _ in range(10):
    ...     loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> state = optimizer.state[model[0].weight]
    >>> {name: tuple(state[name].shape) for name in ("indices", "exp_avg", "exp_avg_sq")}
    {'indices': (4,), 'exp_avg': (64, 4), 'exp_avg_sq': (64, 4)}
    """

    info = Info(
        name="dct_adamw",
        title="DCT-AdamW: Adam in chosen columns of a cosine basis",
        room="optim",
        paper="SVD-Free Low-Rank Adaptive Gradient Optimization for Large Language Models, "
        "arXiv 2505.17967",
        claim="matches projections by SVD in pre-training and fine-tuning, faster and with less "
        "memory",
        traits=("exact_resume", "compiles"),
        traits_if=(("in_backward", True, "frees_gradient_in_backward"),),
        evidence="verified against code",
        claim_verdict="in part",
        against=Against("worse", "GaLore of the same rank"),
        reason="a new subspace takes a sixtieth of an SVD's time at width 1024 and r integers a "
        "matrix, and the loss is 2.9 % above GaLore's, within the 3 asked for; but "
        "gradients lie along cosines no more than along random columns selected alike, "
        "0.98 of their energy",
        run_on_gpu=True,
        slot="optimizer",
        tiny={"rank": 3, "weight_decay": 0.1, "feedback_bits": 8},
    )
    search = SearchTable(
        {
            "learning_rate": LogRange(1e-5, 1e-1, 1e-3),
            "rank": IntegerRange(4, 1024, 128, log=True),
            "update_gap": IntegerRange(1, 200, 1, log=True),
        },
        size="rank",
    )

    @fields_given
    def __init__(
        self,
        params: ParamsT,
        lr: PositiveFloat = 1e-3,
        *,
        rank: PositiveInt = 128,
        update_gap: PositiveInt = 1,
        norm: Literal[1, 2] = 1,
        on_refresh: Literal["keep", "reset", "rotate"] = "rotate",
        feedback_bits: Literal[0, 4, 8, 16, 32] = 0,
        transform: Literal["fft", "product"] = "fft",
        largest: PositiveInt = 32000,
        state_bits: Literal[32, 16, 8] = 32,
        betas: Betas = (0.9, 0.999),
        epsilon: PositiveFloat = 1e-8,
        weight_decay: NonNegativeFloat = 0.0,
        exclude: Strings = ("*embed*", "*lm_head*", "*wte*", "*wpe*"),
        in_backward: bool = False,
    ) -> None: ...

    @classmethod
    def parts_of(cls, value: Any) -> OptimizerParts:
        """The DCT's projector, Adam inside and outside of the subspace, error feedback before."""
        adam = Adam(value.betas, value.epsilon, "outside_root")
        feedback = value.feedback_bits
        return OptimizerParts(
            projector=DCTProjector(value.rank, value.norm, value.transform, value.largest),
            inner=adam,
            rest=adam,
            carried=CarriedOver("error", bits=feedback) if feedback else None,
            update_gap=value.update_gap,
            on_refresh=value.on_refresh,
            bits=value.state_bits,
            exclude=value.exclude,
        )
