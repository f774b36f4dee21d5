"""The proof of Scion: the paper's updates, half of AdamW's state, and less data than tuned AdamW.

The speed-up is that of a character model, both sides at the best of their own learning rates, with
an interval over seeds; see `data_speed_up` for the curve.

Reduced: 0.2 million parameters and a third of a token for each, instead of 130 million with 20. Few
steps favour what converges fast, so the figure says nothing of long runs of large models.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import nn

from modicum.core.contracts.ledger import OptimizerQuery
from modicum.core.contracts.parameters import trained_shapes
from modicum.core.random import normal_
from modicum.models import create
from modicum.optim import Scion
from modicum.optim.orthogonal import STEEP
from modicum.proofs.base import ProofRun
from modicum.proofs.distances import worst
from modicum.proofs.optim.data_speed_up import (
    ADAMW,
    ADAMW_RATES,
    QUICK,
    AgainstAdamW,
    TunedArm,
)
from modicum.proofs.optim.text_bench import Plain

RATES = (2e-2, 4e-2, 8e-2)


def prove(run: ProofRun) -> None:
    """The updates, the state, the data speed-up."""
    as_the_paper(run)
    half_the_state(run)
    less_data(run)


def as_the_paper(run: ProofRun) -> None:
    """Twenty steps of a matrix and a vector against the algorithm, written out, both factors."""
    count = run.contender(5, null=4, null_is="four steps of Newton-Schulz instead of five")
    a, b, c = STEEP
    apart = 0.0
    both: tuple[tuple[Literal["sweep", "paper"], float, float], ...] = (
        ("sweep", 1.0, 0.2),
        ("paper", 50 * math.sqrt(2 / 3), 3000.0),
    )
    for factors, size, rate in both:
        weights = [nn.Parameter(_drawn(shape, "weight")) for shape in ((16, 24), (9,))]
        optimizer = Scion(weights, lr=1e-3, factors=factors, weight_decay=0.1)
        theirs = [weight.detach().clone() for weight in weights]
        moments = [torch.zeros_like(weight) for weight in theirs]
        for step in range(20):
            for place, keep in enumerate((0.9, 0.95)):
                gradient = _drawn(tuple(weights[place].shape), f"step {step}")
                weights[place].grad = gradient.clone()
                moments[place] = keep * moments[place] + (1 - keep) * gradient
            optimizer.step()
            x = moments[0] / moments[0].norm()
            for _ in range(count):
                gram = x @ x.T
                x = a * x + (b * gram + c * gram @ gram) @ x
            updates = size * x, rate * moments[1].sign()
            pairs = zip(theirs, updates, strict=True)
            theirs = [(1 - 1e-3 * 0.1) * one - 1e-3 * update for one, update in pairs]
        for weight, other in zip(weights, theirs, strict=True):
            # The paper's radii make steps of another size.
            apart = worst((apart, (weight.detach() - other).abs().max().item() / size))
    words = "largest difference of a weight from the paper's after 20 steps"
    run.at_most(words, apart, 1e-6, part="check")


def _drawn(shape: tuple[int, ...], name: str) -> torch.Tensor:
    return normal_(torch.empty(shape), seed=0, name=f"{name} {shape}")


def half_the_state(run: ProofRun) -> None:
    """Bytes of moments of a decoder's shapes, against AdamW's."""
    value = run.contender(Scion.value(), null=ADAMW, null_is="AdamW in its place")
    at = OptimizerQuery(trained_shapes(create(QUICK.model, seed=0)))
    kept, adam = (
        each.ledger(at).bytes("optimizer") - 4 * len(at.parameters) for each in (value, ADAMW)
    )
    figure = run.figure("bytes of moments", method=kept, baseline=adam, claimed="half")
    run.at_most("bytes of moments, of AdamW's", figure.ratio, 0.5)


def less_data(run: ProofRun) -> None:
    """The data speed-up over AdamW, and the loss at the same tokens."""
    bench = AgainstAdamW(run)
    arm: TunedArm = run.contender(
        ("Scion", Plain(Scion.value()), RATES),
        null=("AdamW", Plain(ADAMW), ADAMW_RATES),
        null_is="AdamW in Scion's place",
    )
    found = bench.speed_up(arm[0], [arm], claimed="as Muon: 1.4 times AdamW's at 0.1B")
    run.at_least(
        "lower end of the 95 % interval of the data speed-up over AdamW",
        found.lower,
        1.01,
        seeds=found.each,
    )
    run.against("AdamW, tuned alike", "held-out loss at equal tokens", found.losses)
