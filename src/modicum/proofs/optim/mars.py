"""The proof of MARS: the authors' updates, and a loss that is not above tuned AdamW's.

Reduced: 0.2 million parameters and a third of a token for each, instead of 130 million with 20.
"""

from __future__ import annotations

import torch

from modicum.core.random import normal_
from modicum.optim import MARS
from modicum.proofs.base import ProofRun
from modicum.proofs.optim.as_good import as_good_as_adamw

BETAS = (0.95, 0.99)
GAMMA = 0.025


def prove(run: ProofRun) -> None:
    """The updates, the loss."""
    as_the_authors(run)
    value = MARS.value(betas=BETAS, gamma=GAMMA)
    as_good_as_adamw(run, "MARS", value, claimed="1.0 to 1.1 times AdamW's data")


def as_the_authors(run: ProofRun) -> None:
    """Twenty steps in float64 against the authors' code, written out; every third is clipped."""
    (first, second), rate, epsilon, decay = BETAS, 0.01, 1e-8, 0.1
    gamma = run.contender(GAMMA, null=0.0, null_is="AdamW: no correction of the gradient")
    weight = torch.nn.Parameter(normal_(torch.empty(24, 16).double(), seed=0, name="weight"))
    optimizer = MARS(
        [weight], lr=rate, betas=BETAS, gamma=GAMMA, epsilon=epsilon, weight_decay=decay
    )
    theirs = weight.detach().clone()
    mean, square, last = (torch.zeros_like(theirs) for _ in range(3))
    for step in range(1, 21):
        gradient = normal_(torch.empty(24, 16).double(), seed=0, name="gradient", step=step)
        gradient *= 0.01 if step % 3 else 1.0
        weight.grad = gradient.clone()
        optimizer.step()
        corrected = gradient + gamma * first / (1 - first) * (gradient - last)
        corrected = corrected / corrected.norm().clamp(min=1)
        mean = first * mean + (1 - first) * corrected
        square = second * square + (1 - second) * corrected**2
        root = (square / (1 - second**step)).sqrt() + epsilon
        theirs = theirs * (1 - rate * decay) - rate * mean / (1 - first**step) / root
        last = gradient
    apart = (weight.detach() - theirs).abs().max().item()
    words = "largest difference of a weight from the authors' after 20 steps"
    run.at_most(words, apart, 1e-10, part="check")
