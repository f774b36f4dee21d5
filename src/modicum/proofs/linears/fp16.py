"""The proof of fp16: weights of fp16 take half of fp32's bytes, and nothing of them is lost.

Weights are normal numbers as a file of fp16 holds them, [256, 4096], of the size that weights of
layers have. The baseline holds them in fp32, the best simple alternative rounds them to bf16, which
takes as many bytes.

Reduced: the paper trains with a second copy of the weights in fp32; here they are frozen.
"""

from __future__ import annotations

from statistics import fmean

import torch

from modicum.core.layers.linear_forms import linear_form
from modicum.proofs.base import ProofRun
from modicum.proofs.linears.rounding import COLUMNS, bits_an_element, lost, normal_weight


def prove(run: ProofRun) -> None:
    """Hold weights of several seeds, compute with them, and count the bits."""
    run.seeds = tuple(range(10 if run.full else 3))
    fp16 = linear_form("fp16")
    held_as = run.contender(
        fp16.round_trip,
        null=lambda weight: weight.bfloat16().float(),
        null_is="bf16 instead of fp16",
    )
    mine, outputs, rounded = [], [], []
    for seed in run.seeds:
        run.progress("holding weights")
        weight = (normal_weight(seed) / COLUMNS**0.5).half().float()
        inputs, held = normal_weight(seed + 1000)[:64], held_as(weight)
        mine.append(lost(held, weight))
        outputs.append(float(torch.equal(inputs @ held.T, inputs @ weight.T)))
        rounded.append(lost(weight.bfloat16().float(), weight))
    run.figure(
        "bits an element",
        method=(bits := bits_an_element(fp16)),
        baseline=32,
        claimed="half of fp32's",
    )
    run.at_most("bits an element", bits, 16)
    run.at_most("error of a weight, of its norm", fmean(mine), 0.0)
    run.at_least("outputs equal to the bit, of all", fmean(outputs), 1.0)
    run.against(
        "bf16 weights", "error of a weight", [m / b for m, b in zip(mine, rounded, strict=True)]
    )
