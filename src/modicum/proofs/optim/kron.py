"""The proof of Kron: the peer's updates, what they cost, and less data than tuned AdamW.

The speed-up is that of a character model, both sides at the best of their own learning rates, with
an interval over seeds; see `data_speed_up` for the curve.

Reduced: 0.2 million parameters and a third of a token for each, instead of 130 million with 20. The
factors are fitted in every step of so short a run, and have hardly come to rest at its end.
"""

from __future__ import annotations

import torch
from torch import nn

from modicum.core.random import normal_
from modicum.optim import Kron
from modicum.optim.kron import largest_eigenvalue
from modicum.proofs.base import ProofRun
from modicum.proofs.optim.text_bench import Plain
from modicum.proofs.optim.whitened_bench import costs, drawn, less_data

RATES = (2e-3, 4e-3, 8e-3)


def prove(run: ProofRun) -> None:
    """The updates, the cost, the data speed-up."""
    as_the_peer(run)
    seldom = Kron.value(flat_steps=0, probability_decay=100.0, least_probability=0.05)
    tried = {"fitted in each": Kron.value(), "fitted in one of twenty": seldom}
    costs(run, tried)
    claimed = "less than Muon up to four times Chinchilla, more at eight; at most 1.4 at 0.1B"
    arms = [("Kron", Plain(Kron.value()), RATES)]
    if run.full:
        arms.append(("Kron, AdamW at twice the rate", Plain(Kron.value(adam_rate=2.0)), RATES))
    less_data(run, "Kron", arms, claimed=claimed, alike="Kron's")


def as_the_peer(run: ProofRun) -> None:
    """Twenty steps of a matrix against the equations, written out in float64, with its probes."""
    size = run.contender(0.2, null=0.0, null_is="factors that stay the identity: momentum")
    weight = nn.Parameter(torch.zeros(16, 24))
    optimizer = Kron([weight], lr=1e-2, momentum=0.9, factor_rate=0.2, normalized=False)
    theirs, mean = (torch.zeros(16, 24).double() for _ in range(2))
    left, right = (torch.eye(side).double() for side in (16, 24))
    for step in range(1, 21):
        weight.grad = drawn(16, 24, name=f"step {step}")
        optimizer.step()
        mean = 0.9 * mean + 0.1 * weight.grad.double()
        m = mean / (1 - 0.9**step)
        probe = normal_(torch.empty(16, 24).double(), seed=0, name="kron/0", step=step)
        a = left @ m @ right.T
        b = torch.linalg.inv(left).T @ probe @ torch.linalg.inv(right)
        pairs = (left, a @ a.T, b @ b.T), (right, a.T @ a, b.T @ b)
        left, right = (
            q - size * torch.triu(one - two) / largest_eigenvalue(one + two) @ q
            for q, one, two in pairs
        )
        u = left.T @ left @ m @ right.T @ right
        theirs = theirs - 1e-2 * u * min(1.0, 1.1 / (u.square().mean().sqrt().item() + 1e-6))
    apart = (weight.detach() - theirs).abs().max().item()
    run.at_most("largest difference of a weight after 20 steps", apart, 1e-4, part="check")
