"""The proof of SST: the part of the gap between low-rank adapters and full training that it closes.

A character model of Python's standard library (`text_bench.py`): its projections dense and trained
in full; as SST; and frozen at random with LoRA of the same rank, as in the paper, once trained
throughout and once merged and begun anew (ReLoRA). Embeddings, norms and head are trained by all.
The optimizer's state of SST is LoRA's and a number for each singular value.

At these sizes LoRA lacks little unless its rank is least, so the rank is 1.

Reduced: the paper trains OPT and LLaMA of up to 1.3 billion parameters; hyperbolic networks are not
here.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from modicum.core.contracts.parameters import optimizer_groups
from modicum.linears.sst import SST
from modicum.models.llama import Llama
from modicum.optim import AdamW
from modicum.proofs.base import ProofRun, ratios
from modicum.proofs.bench.sweep import Swept
from modicum.proofs.linears.formed_text import FormedArm, FormedSize, best_arm, formed_sweep
from modicum.proofs.optim.text_bench import Adapted, Started, TextResult

QUICK = FormedSize(width=64, layers=2, mlp_width=172, tokens=32, rows=8, steps=500)
FULL = FormedSize(width=128, layers=2, mlp_width=344, tokens=64, rows=8, steps=1000)
RATES = (4e-3, 8e-3, 1.6e-2)
# In the quick run an arm has one rate, the better one of it and twice or half of it; the full one
# sweeps. ReLoRA has LoRA's.
QUICK_RATES = {"SST": 1.6e-2, "dense": 2e-3, "LoRA": 8e-3, "ReLoRA": 8e-3}
RANK = 1


@dataclass(frozen=True)
class Spectral:
    """All that SST leaves to train by AdamW, with its rounds."""

    method: SST

    def start(self, model: Llama, rate: float) -> Started:
        """The optimizer, and what swaps vectors."""
        groups = optimizer_groups(model, learning_rate=rate, weight_decay=0.0)
        optimizer = AdamW.value(betas=(0.9, 0.999)).bind(groups)
        return Started([optimizer], hook=self.method.run_hook(model))


@dataclass(frozen=True)
class DenseByAdam:
    """Every weight by AdamW."""

    def start(self, model: Llama, rate: float) -> Started:
        """The optimizer."""
        groups = optimizer_groups(model, learning_rate=rate, weight_decay=0.0)
        return Started([AdamW.value(betas=(0.9, 0.999)).bind(groups)])


def prove(run: ProofRun) -> None:
    """Train the dense decoder, SST, LoRA of its rank, and LoRA that is merged as often."""
    size, interval = (FULL, 45) if run.full else (QUICK, 45)
    run.seeds = (0, 1, 2) if run.full else (0,)
    method = SST(rank=RANK, interval=interval)
    formed = size.taking(method)
    lora = FormedArm(size, Adapted(RANK, every=size.steps + 1))
    contender = run.contender(
        FormedArm(formed, Spectral(method)),
        null=lora,
        null_is="LoRA of the same rank, on a frozen base",
    )
    sweep = formed_sweep(run)

    def best(name: str, arm: FormedArm) -> Swept[TextResult]:
        known = arm is not contender
        return best_arm(run, sweep, name, arm, RATES, QUICK_RATES, baseline=known)

    mine = best("SST", contender)
    full = best("dense", FormedArm(size, DenseByAdam()))
    low = best("LoRA", lora)
    again = best("ReLoRA", FormedArm(size, Adapted(RANK, every=2 * interval)))
    for name, found in (("dense", full), ("LoRA", low), ("ReLoRA", again)):
        for figure, what in (("loss", "held-out loss (nats)"), ("state_bytes", "optimizer bytes")):
            run.figure(
                f"{what}, over {name}", method=mine.mean(figure), baseline=found.mean(figure)
            )
    held, dense = sum(formed.elements.values()), sum(formed.dense_elements.values())
    run.figure("elements of the projections", method=held, baseline=dense)
    losses = [found.each("loss") for found in (mine, full, low)]
    closed = [(c - a) / (c - b) for a, b, c in zip(*losses, strict=True)]
    gap = low.mean("loss") - full.mean("loss")
    run.at_least("loss of LoRA above the dense decoder's (nats)", gap, 0.05, part="check")
    if len(run.seeds) > 1:
        gaps = [one - other for one, other in zip(losses[2], losses[1], strict=True)]
        deviations = gap / max(statistics.stdev(gaps), 1e-9)
        run.at_least("the same in deviations over seeds", deviations, 5.0, part="check")
    mean = (low.mean("loss") - mine.mean("loss")) / gap
    run.at_least("of LoRA's gap to full training, the part closed", mean, 0.5, seeds=closed)
    more = low.mean("state_bytes") + 2 * 4 * formed.sides
    share = mine.mean("state_bytes") / more
    run.at_most("optimizer's state, over LoRA's of one rank more", share, 1.0, part="check")
    rival = min((low, again), key=lambda found: found.mean("loss"))
    over = ratios(mine.each("loss"), rival.each("loss"))
    run.against("LoRA of as much state", "held-out loss at equal steps", over)
