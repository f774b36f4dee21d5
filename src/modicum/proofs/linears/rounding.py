"""What rounding a weight loses: random weights, and roundings to even steps to compare with."""

from __future__ import annotations

import torch
from torch import Tensor

from modicum.core.layers.linear_forms import LinearForm
from modicum.core.random import normal_
from modicum.linears.quantized import GROUP

ROWS, COLUMNS = 256, 4096
TAIL, LARGER = 0.001, 20.0  # the part of the weights that are outliers, and how large they are


def normal_weight(seed: int, outliers: bool = False) -> Tensor:
    """A weight [256, 4096] of standard normal numbers; a thousandth of them 20 times as large."""
    weight = normal_(torch.empty(ROWS, COLUMNS), seed=seed, name="weight")
    if outliers:
        chance = normal_(torch.empty(ROWS, COLUMNS), seed=seed, name="outliers")
        bar = chance.flatten().topk(round(TAIL * chance.numel())).values[-1]
        weight = torch.where(chance >= bar, LARGER * weight, weight)
    return weight


def lost(held: Tensor, weight: Tensor) -> float:
    """The norm of what rounding took away, over the weight's."""
    return ((held - weight).norm() / weight.norm()).item()


def bits_an_element(form: LinearForm) -> float:
    """Of a weight of 4,096 columns, with all that its scales take."""
    return 8 * form.weight_bytes(COLUMNS, ROWS) / (ROWS * COLUMNS)


def even_steps(weight: Tensor, bits: int, group: int = GROUP, reach: float = 1.0) -> Tensor:
    """The weight rounded to even steps, in groups of consecutive entries of a row.

    Args:
        group: entries that share a scale, kept exactly.
        reach: of a group's largest magnitude, where the last step lies; beyond it is clipped.
    """
    groups = weight.reshape(-1, group)
    largest = 2 ** (bits - 1) - 1
    step = reach * groups.abs().amax(1, keepdim=True) / largest
    codes = (groups / step.clamp_min(torch.finfo(step.dtype).tiny)).round()
    return (codes.clamp(-largest - 1, largest) * step).reshape(weight.shape)


def best_reach(weight: Tensor, bits: int, group: int = GROUP) -> Tensor:
    """`even_steps` at the reach, of twenty, at which a weight loses least."""
    tried = (even_steps(weight, bits, group, 0.525 + 0.025 * number) for number in range(20))
    return min(tried, key=lambda held: lost(held, weight))
