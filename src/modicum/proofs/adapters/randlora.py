"""The proof of RandLoRA: which changes it can represent, and a network that must change a lot.

A given change of a 64 x 64 weight is fitted at as many trained numbers as LoRA's, and the share of
its squared size that is captured is compared with the best that any LoRA of so many numbers can do,
by the singular values. A flat spectrum is what RandLoRA is for; a Gaussian matrix and one of rank 8
are shown next to it, since LoRA wins there. Then the lab: digits turned by a quarter, test errors
after 200 steps, each side at the rate with the fewest: both fit their own images in the end.

Reduced: the quick run has 2 seeds and 3 rates, the full one 5 and 5. CLIP, language models and a
GPU's times are not run.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from modicum.adapters import LoRA, RandLoRA
from modicum.adapters.base import Adapter
from modicum.core.random import normal_
from modicum.proofs.adapters.digits_bench import DigitsBench
from modicum.proofs.base import ProofRun, ratios
from modicum.proofs.bench.sweep import Sweep

WIDTH, FITTING_STEPS = 64, 1500
FITTING_RATES = (3e-3, 1e-2, 3e-2)
# Of 1088 numbers RandLoRA has 16 bases of rank 4, LoRA rank 8.5; of 576, 8 of rank 8 and 4.5.
RANKS = {4: 8.5, 8: 4.5}
RATES = (2e-3, 5e-3, 1e-2, 2e-2, 5e-2)


def prove(run: ProofRun) -> None:
    """Fit given changes, then adapt a network."""
    given_changes(run)
    turned_digits(run)


def given_changes(run: ProofRun) -> None:
    """The share of a change's squared size that is captured at equal trained numbers."""
    for rank, of_lora in RANKS.items():
        lora = LoRA(rank=int(of_lora))
        value = run.contender(RandLoRA(rank=rank), null=lora, null_is="LoRA in RandLoRA's place")
        for name, change in targets().items():
            mine = captured(run, f"fitting {name}", value, change)
            theirs = best_low_rank(change, of_lora)
            label = f"captured of {name}, {2 * WIDTH * of_lora:.0f} trained numbers"
            figure = run.figure(label, method=mine, baseline=theirs)
            if name == "a flat spectrum":
                sentence = f"{label}, over the best of any LoRA"
                run.at_least(sentence, figure.ratio, 2.0)


def turned_digits(run: ProofRun) -> None:
    """Accuracy on images that nobody has seen, against LoRA of slightly more numbers."""
    bench, lora = DigitsBench(run), LoRA(rank=4)
    run.seeds = (0, 1, 2, 3, 4) if run.full else (0, 1)
    value = run.contender(RandLoRA(rank=32), null=lora, null_is="LoRA in RandLoRA's place")
    rates = RATES if run.full else RATES[1:-1]
    mine = bench.most_accurate(value, rates)
    theirs = bench.most_accurate(lora, rates, baseline=True)
    for name in ("accuracy", "loss", "trained"):
        label = f"{name}, digits turned by a quarter"
        run.figure(label, method=mine.mean(name), baseline=theirs.mean(name))
    run.at_most(
        "trained numbers over LoRA's",
        mine.mean("trained") / theirs.mean("trained"),
        1,
        part="check",
    )
    above = [a - b for a, b in zip(mine.each("accuracy"), theirs.each("accuracy"), strict=True)]
    gained = mine.mean("accuracy") - theirs.mean("accuracy")
    run.at_least("accuracy above LoRA's of as many numbers", gained, 0.02, seeds=above)
    each = ratios(mine.each("error"), theirs.each("error"))
    run.against("LoRA of as many trained parameters", "test errors after 200 steps", each)


def targets() -> dict[str, Tensor]:
    """Changes [64, 64] of one squared size."""
    drawn = normal_(torch.empty(WIDTH, WIDTH), seed=0, name="change")
    other = normal_(torch.empty(WIDTH, 8), seed=0, name="low rank")
    found = {
        "a flat spectrum": torch.linalg.qr(drawn)[0],
        "a Gaussian matrix": drawn,
        "a matrix of rank 8": other @ other.T @ drawn,
    }
    return {name: change * (WIDTH**0.5 / change.norm()) for name, change in found.items()}


def captured(run: ProofRun, name: str, value: Adapter, change: Tensor) -> float:
    """The share of a change's squared size that an adapter of one layer captures, at its best rate.

    Least squares on the change itself, by Adam.
    """
    sweep: Sweep[Adapter, float] = Sweep(
        run, lambda arm, rate, seed: _fitted(arm, change, rate), lambda share: -share
    )
    return max(sweep.outcome(name, value, rate, 0) for rate in FITTING_RATES)


def _fitted(value: Adapter, change: Tensor, rate: float) -> float:
    attached = value.attach(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)))
    [(_, layer)] = attached.layers()
    optimizer = torch.optim.Adam(attached.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, FITTING_STEPS)
    for _ in range(FITTING_STEPS):
        loss = (layer.delta() - change).square().sum()
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    left = (layer.delta() - change).square().sum() / change.square().sum()
    return 1 - left.item()


def best_low_rank(change: Tensor, rank: float) -> float:
    """The most that rank r captures; between two ranks as much of the next one as there is."""
    energy = torch.linalg.svdvals(change).square()
    energy = energy / energy.sum()
    full = int(rank)
    return float(energy[:full].sum() + (rank - full) * energy[full])
