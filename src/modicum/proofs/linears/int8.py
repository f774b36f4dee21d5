"""The proof of int8: scales of small groups keep eight bits exact next to much larger weights.

Weights are [256, 4096]: normal ones, of which a thousandth is 20 times as large. The baseline has
one scale for the full matrix, the best simple alternative one for each row, both kept exactly.

Reduced: the paper quantizes the state of optimizers, in blocks of 2,048; here it is weights, in
groups of 64, with even levels. Its models are not trained here.
"""

from __future__ import annotations

from statistics import fmean

from modicum.core.layers.linear_forms import linear_form
from modicum.proofs.base import ProofRun, ratios
from modicum.proofs.linears.rounding import (
    COLUMNS,
    ROWS,
    bits_an_element,
    even_steps,
    lost,
    normal_weight,
)

BITS = 8


def prove(run: ProofRun) -> None:
    """Round weights of several seeds with scales of each size, and count the bits."""
    run.seeds = tuple(range(10 if run.full else 3))
    int8 = linear_form("int8")
    rounded = run.contender(
        int8.round_trip,
        null=lambda weight: even_steps(weight, BITS, ROWS * COLUMNS),
        null_is="one scale for the full matrix",
    )
    mine, full, rows, plain = [], [], [], []
    for seed in run.seeds:
        run.progress("rounding weights")
        weight, normal = normal_weight(seed, outliers=True), normal_weight(seed)
        mine.append(lost(rounded(weight), weight))
        full.append(lost(even_steps(weight, BITS, ROWS * COLUMNS), weight))
        rows.append(lost(even_steps(weight, BITS, COLUMNS), weight))
        plain.append(lost(rounded(normal), normal))
    figure = run.figure(
        "error of a weight with outliers, of its norm",
        method=fmean(mine),
        baseline=fmean(full),
        claimed="outliers are confined to their blocks",
    )
    run.at_most("error, of one scale's", figure.ratio, 0.5, seeds=ratios(mine, full))
    run.at_most("error of a normal weight", fmean(plain), 0.0065, part="check")
    bits = bits_an_element(int8)
    run.figure("bits an element, scales included", method=bits, baseline=BITS)
    run.at_most("bits an element, scales included", bits, 8.2, part="check")
    run.against("one scale a row", "error of a weight with outliers", ratios(mine, rows))
