"""The proof of SOAP: the authors' updates, what they cost, and less data than tuned AdamW.

The speed-up is that of a character model, both sides at the best of their own learning rates, with
an interval over seeds; see `data_speed_up` for the curve.

Reduced: 0.2 million parameters and a third of a token for each, instead of 130 million with 20. The
claim is of long runs, of which these few steps say little.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from modicum.optim import SOAP
from modicum.proofs.base import ProofRun
from modicum.proofs.optim.text_bench import Plain
from modicum.proofs.optim.whitened_bench import costs, drawn, less_data

RATES = (6e-3, 1.2e-2, 2.4e-2)
BETAS, FACTOR = (0.95, 0.98), 0.95


def prove(run: ProofRun) -> None:
    """The updates, the cost, the data speed-up."""
    as_the_authors(run)
    tried = {f"refreshed each {gap}": SOAP.value(frequency=gap) for gap in (1, 10)}
    costs(run, tried)
    arms = [("SOAP", Plain(SOAP.value()), RATES)]
    if run.full:
        arms.append(("SOAP, refreshed each 10", Plain(SOAP.value(frequency=10)), RATES))
    claimed = "as Muon up to four times Chinchilla, more at eight; at most 1.4 at 0.1B"
    less_data(run, "SOAP", arms, claimed=claimed, alike="SOAP's")


def as_the_authors(run: ProofRun) -> None:
    """Twenty steps of a matrix against the authors' code, written out in float64."""
    gap = run.contender(1, null=20, null_is="the first gradient's bases, never refreshed")
    weight = nn.Parameter(torch.zeros(16, 16))
    optimizer = SOAP([weight], lr=1e-2, betas=BETAS, factor_beta=FACTOR)
    theirs, mean, square = (torch.zeros(16, 16).double() for _ in range(3))
    factors = [torch.zeros(16, 16).double() for _ in range(2)]
    bases: list[torch.Tensor] = []
    for step in range(20):
        weight.grad = drawn(16, 16, name=f"step {step}")
        optimizer.step()
        g = weight.grad.double()
        if step:
            left, right = bases
            mean = BETAS[0] * mean + (1 - BETAS[0]) * g
            square = BETAS[1] * square + (1 - BETAS[1]) * (left.T @ g @ right) ** 2
            size = math.sqrt(1 - BETAS[1] ** step) / (1 - BETAS[0] ** step)
            turned = left.T @ mean @ right / (square.sqrt() + 1e-8)
            theirs = theirs - 1e-2 * size * left @ turned @ right.T
        outer = g @ g.T, g.T @ g
        factors = [FACTOR * one + (1 - FACTOR) * o for one, o in zip(factors, outer, strict=True)]
        if not step:
            bases = [torch.linalg.eigh(one)[1].flip(1) for one in factors]
        elif step % gap == 0:
            for side, (one, basis) in enumerate(zip(factors, bases, strict=True)):
                order = (basis.T @ one @ basis).diag().argsort(descending=True)
                square = square.index_select(side, order)
                bases[side] = torch.linalg.qr(one @ basis[:, order])[0]
    apart = (weight.detach() - theirs).abs().max().item()
    run.at_most("largest difference of a weight after 20 steps", apart, 1e-4, part="check")
