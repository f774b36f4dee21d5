"""The proof of NF4: of a normal weight it loses less than four bits in even steps.

Weights are [256, 4096], drawn from a normal distribution, as the claim is about. The baseline
rounds to even steps with a scale for as many weights; the best simple alternative clips these where
it loses least. Both keep their scales exactly, where NF4 keeps them in 8 bits.

Reduced: what a language model's loss becomes, which the paper measures at 7 to 65 billion
parameters, is not run here; the outputs of a random layer are measured.
"""

from __future__ import annotations

from statistics import fmean

from modicum.core.layers.linear_forms import linear_form
from modicum.proofs.base import ProofRun, ratios
from modicum.proofs.linears.rounding import (
    best_reach,
    bits_an_element,
    even_steps,
    lost,
    normal_weight,
)

BITS = 4


def prove(run: ProofRun) -> None:
    """Round weights of several seeds in each way, and count the bits."""
    run.seeds = tuple(range(10 if run.full else 3))
    nf4 = linear_form("nf4")
    rounded = run.contender(
        nf4.round_trip,
        null=lambda weight: even_steps(weight, BITS),
        null_is="even steps instead of normal quantiles",
    )
    mine, even, clipped, outputs = [], [], [], []
    for seed in run.seeds:
        run.progress("rounding weights")
        weight, inputs = normal_weight(seed), normal_weight(seed + 1000)[:64]
        held, steps = rounded(weight), even_steps(weight, BITS)
        mine.append(lost(held, weight))
        even.append(lost(steps, weight))
        clipped.append(lost(best_reach(weight, BITS), weight))
        out = inputs @ weight.T
        outputs.append(lost(inputs @ held.T, out) / lost(inputs @ steps.T, out))
    figure = run.figure(
        "error of a normal weight, of its norm",
        method=fmean(mine),
        baseline=fmean(even),
        claimed="information-theoretically optimal for normal weights",
    )
    run.at_most("error, of that of even steps", figure.ratio, 0.92, seeds=ratios(mine, even))
    run.at_most("error of a layer's outputs, of that of even steps", fmean(outputs), 0.92)
    run.at_most("error of a normal weight", fmean(mine), 0.095, part="check")
    bits = bits_an_element(nf4)
    run.figure("bits an element, scales included", method=bits, baseline=BITS + 32 / 64)
    run.at_most("bits an element, scales included", bits, 4.2, part="check")
    run.against("4 bits in even steps, clipped", "error of a normal weight", ratios(mine, clipped))
