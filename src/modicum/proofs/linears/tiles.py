"""The proof of tiles: a change that is one number in each tile merges without loss, at any bits.

Weights are [256, 4096], drawn from a normal distribution, and so are the changes, a tenth as large
and constant on tiles of 8 x 4. The baseline, which is the best simple alternative too, has as many
bits a weight: a scale and a zero point for 32 neighbours of a row, as other formats have them. It
rounds the changed weight again. Zero points are in fp32; what those in fp16 round is a figure.

Reduced: what a model learns by such changes is the proof of `qa_hira`, not this one.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from modicum.core.layers.linear_forms import linear_form
from modicum.core.random import normal_
from modicum.linears.tiles import TileLinear
from modicum.proofs.base import ProofRun
from modicum.proofs.linears.rounding import COLUMNS, ROWS, lost, normal_weight

BITS, TILE, SIZE = (2, 3, 4), (8, 4), 0.1
OF_ROWS: dict[str, Any] = {"tile_rows": 1, "tile_columns": TILE[0] * TILE[1]}


def prove(run: ProofRun) -> None:
    """Merge changes of several seeds at each number of bits, and round weights both ways."""
    run.seeds = tuple(range(20 if run.full else 8))
    merge = run.contender(
        shifted, null=rounded_again, null_is="the changed weight rounded again, in rows of 32"
    )
    mine, theirs, half, codes, errors = [], [], [], 0, []
    round_trip = linear_form("tiles").round_trip
    for seed in run.seeds:
        run.progress("merging")
        weight, change = normal_weight(seed), _change(seed)
        own = []
        for bits in BITS:
            found, differ = merge(weight, change, bits, "fp32")
            mine.append(found)
            codes += differ
            theirs.append(rounded_again(weight, change, bits, "fp32")[0])
            half.append(merge(weight, change, bits, "fp16")[0])
            of_rows = lost(round_trip(weight, bits=bits, **OF_ROWS), weight)
            own.append(lost(round_trip(weight, bits=bits), weight) / of_rows)
        errors.append(fmean(own))
    figure = run.figure(
        "lost of a change, zero points in fp32",
        method=fmean(mine),
        baseline=fmean(theirs),
        claimed="adapters merge naturally",
    )
    run.figure("lost of a change, zero points in fp16", method=fmean(half), baseline=fmean(theirs))
    run.at_most("lost of a change", figure.method, 1e-5, seeds=mine)
    run.at_most("bytes of codes and scales that differ", codes, 0)
    held = 8 * linear_form("tiles").weight_bytes(COLUMNS, ROWS, bits=2) / (ROWS * COLUMNS)
    run.figure("bits a weight at two bits", method=held, baseline=2 + 2 * 16 / 32)
    run.at_most("bits a weight at two bits", held, 3.01, part="check")
    run.against("rows of 32 with as many bits", "error of a normal weight", errors)


def shifted(weight: Tensor, change: Tensor, bits: int, numbers: str) -> tuple[float, int]:
    """What is lost of a change that zero points take, and how many codes and scales differ."""
    layer = TileLinear.from_dense(weight, bits=bits, zero_points=numbers)
    wanted, kept = layer.to_dense() + change, (layer.codes.clone(), layer.scales.clone())
    taken = layer.shift(change)
    assert taken is not None
    with torch.no_grad():
        for name, value in taken.items():
            layer.get_parameter(name).copy_(value)
    return _lost(layer.to_dense(), wanted, change), _differ(kept, layer)


def rounded_again(weight: Tensor, change: Tensor, bits: int, numbers: str) -> tuple[float, int]:
    """The same of rows of 32, which are made anew of the changed weight."""
    layer = TileLinear.from_dense(weight, bits=bits, zero_points=numbers, **OF_ROWS)
    wanted, kept = layer.to_dense() + change, (layer.codes.clone(), layer.scales.clone())
    layer.write(wanted)
    return _lost(layer.to_dense(), wanted, change), _differ(kept, layer)


def _change(seed: int) -> Tensor:
    rows, columns = ROWS // TILE[0], COLUMNS // TILE[1]
    each = normal_(torch.empty(rows, columns), seed=seed, name="change", std=SIZE)
    return each.repeat_interleave(TILE[0], 0).repeat_interleave(TILE[1], 1)


def _lost(found: Tensor, wanted: Tensor, change: Tensor) -> float:
    return ((found - wanted).norm() / change.norm()).item()


def _differ(kept: tuple[Tensor, Tensor], layer: TileLinear) -> int:
    pairs = zip(kept, (layer.codes, layer.scales), strict=True)
    return sum(int((one != other).sum()) for one, other in pairs)
