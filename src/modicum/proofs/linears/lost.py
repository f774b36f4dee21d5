"""The proof of LOST: half of the elements, near the dense decoder, better than low-rank factors.

A character model of Python's standard library (`text_bench.py`), its projections dense, LOST, or
low-rank factors of as many elements from drawn numbers, with the same batches; each at the best of
its learning rates. The full run also takes LOST apart, at LOST's own rate: the low-rank path drawn
and not of the SVD, no activation, channels drawn and not those of the largest residual.

Reduced: the paper trains LLaMA of up to 7 billion parameters on C4. First weights are Gaussian,
whose spectrum is flat, so that the SVD has little to find.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from modicum.core.random import normal_, sample
from modicum.linears.lost import LOST, LOSTLinear
from modicum.models.llama import Llama
from modicum.optim import AdamW
from modicum.proofs.base import ProofRun, ratios
from modicum.proofs.linears.formed_text import FormedArm, FormedSize, best_arm, formed_sweep
from modicum.proofs.optim.text_bench import Plain, Started

RATES = (4e-3, 8e-3, 1.6e-2)
# In the quick run an arm has one rate, the best of it and of twice and half of it; the full one
# sweeps.
QUICK_RATES = {"LOST": 8e-3, "dense": 4e-3, "low-rank": 8e-3}
QUICK = FormedSize(width=64, layers=2, mlp_width=172, tokens=64, rows=8, steps=250)
FULL = FormedSize(width=128, layers=2, mlp_width=344, tokens=64, rows=8, steps=1000)


@dataclass(frozen=True)
class Ablated:
    """LOST that begins otherwise.

    Args:
        drawn_path: its low-rank path is drawn, as large on average as it was.
        drawn_channels: its channels are drawn.
    """

    drawn_path: bool = False
    drawn_channels: bool = False

    @torch.no_grad()
    def start(self, model: Llama, rate: float) -> Started:
        """Change how the layers begin, and train all."""
        for name, layer in model.named_modules():
            if not isinstance(layer, LOSTLinear):
                continue
            if self.drawn_path:
                size = (layer.up @ layer.down).std().item()
                each = math.sqrt(size / math.sqrt(layer.rank))
                normal_(layer.down, seed=1, name=f"{name}.down", std=each)
                up = normal_(torch.empty(layer.up.shape), seed=1, name=f"{name}.up", std=each)
                layer.up.copy_(up)
            if self.drawn_channels:  # columns of a drawn weight are alike
                drawn = sample(layer.in_features, len(layer.chosen), seed=1, name=name)
                layer.chosen.copy_(drawn)
        return Plain(AdamW.value()).start(model, rate)


def prove(run: ProofRun) -> None:
    """Train the dense decoder, LOST with half of its elements, and low-rank factors of as many."""
    dense = FULL if run.full else QUICK
    run.seeds = (0, 1, 2) if run.full else (0,)
    form = run.contender(
        LOST(),
        null=LOST(rank=1),
        null_is="a low-rank path of rank 1",
        planted=LOST(share=0.6),
    )
    mine, like = dense.taking(form), dense.taking(LOST())
    sweep = formed_sweep(run)
    arms = {
        "LOST": FormedArm(mine),
        "dense": FormedArm(dense),
        "low-rank": FormedArm(like.low_rank()),
    }
    rivals = ("dense", "low-rank")
    best = {
        name: best_arm(run, sweep, name, arm, RATES, QUICK_RATES, baseline=name in rivals)
        for name, arm in arms.items()
    }
    if run.full:
        plain = dense.taking(form.model_copy(update={"activation": "identity"}))
        parts = {
            "LOST, path drawn": FormedArm(mine, Ablated(drawn_path=True)),
            "LOST, channels drawn": FormedArm(mine, Ablated(drawn_channels=True)),
            "LOST without activation": FormedArm(plain),
            "LOST without activation, path drawn": FormedArm(plain, Ablated(drawn_path=True)),
        }
        rate = best["LOST"].learning_rate
        best |= {name: sweep.at(name, arm, rate) for name, arm in parts.items()}
    losses = {name: found.each("loss") for name, found in best.items()}
    for name, found in best.items():
        if name != "LOST":
            run.figure(
                f"held-out loss (nats), over that of {name}",
                method=best["LOST"].mean("loss"),
                baseline=found.mean("loss"),
            )
    held, full = sum(mine.elements.values()), sum(mine.dense_elements.values())
    run.figure("elements of the projections", method=held, baseline=full)
    run.at_most("elements of the projections, of dense ones", held / full, 0.55, part="check")
    over = ratios(losses["LOST"], losses["dense"])
    run.at_most("loss, of the dense decoder's", sum(over) / len(over), 1.03, seeds=over)
    over = ratios(losses["LOST"], losses["low-rank"])
    run.at_most(
        "loss, of low-rank factors' from drawn numbers", sum(over) / len(over), 1.0, seeds=over
    )
    run.against("low-rank factors of as many parameters", "held-out loss at equal steps", over)
