"""The proof of cautious AdamW: the authors' updates, and a loss that is not above tuned AdamW's.

Reduced: 0.2 million parameters and a third of a token for each, instead of 130 million with 20.
"""

from __future__ import annotations

import torch

from modicum.core.random import normal_
from modicum.optim import Cautious
from modicum.proofs.base import ProofRun
from modicum.proofs.optim.as_good import as_good_as_adamw

BETAS = (0.9, 0.95)


def prove(run: ProofRun) -> None:
    """The updates, the loss."""
    as_the_authors(run)
    value = Cautious.value(betas=BETAS)
    as_good_as_adamw(run, "cautious AdamW", value, claimed="1.0 to 1.1 times AdamW's data")


def as_the_authors(run: ProofRun) -> None:
    """Twenty steps in float64 against the authors' code, written out."""
    (first, second), rate, epsilon, decay = BETAS, 0.01, 1e-8, 0.1
    masks = run.contender(True, null=False, null_is="AdamW without a mask")
    weight = torch.nn.Parameter(normal_(torch.empty(24, 16).double(), seed=0, name="weight"))
    optimizer = Cautious([weight], lr=rate, betas=BETAS, epsilon=epsilon, weight_decay=decay)
    theirs = weight.detach().clone()
    mean, square = torch.zeros_like(theirs), torch.zeros_like(theirs)
    for step in range(1, 21):
        gradient = normal_(torch.empty(24, 16).double(), seed=0, name="gradient", step=step)
        weight.grad = gradient.clone()
        optimizer.step()
        mean = first * mean + (1 - first) * gradient
        square = second * square + (1 - second) * gradient**2
        root = (square / (1 - second**step)).sqrt() + epsilon
        update = mean / (1 - first**step) / root
        if masks:
            mask = (mean * gradient > 0).double()
            update = update * mask / mask.mean().clamp(min=1e-3)
        theirs = theirs * (1 - rate * decay) - rate * update
    apart = (weight.detach() - theirs).abs().max().item()
    words = "largest difference of a weight from the authors' after 20 steps"
    run.at_most(words, apart, 1e-10, part="check")
