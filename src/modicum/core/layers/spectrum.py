"""How many of a matrix's terms count, by the values that they have."""

from __future__ import annotations

import torch
from torch import Tensor

_ALIKE = 1e-4  # values that differ by less of themselves have no elbow


def enough(values: Tensor, share: float) -> int:
    """The fewest of the values [k], falling, whose squares sum to `share`; all if none do.

    >>> enough(torch.tensor([3.0, 2.0, 1.0]), 13.0)
    2
    """
    return min(int((values.square().cumsum(0) < share).sum()) + 1, len(values))


def elbow(values: Tensor) -> int:
    """How many of the values [k], falling, come before their elbow; all where they are alike.

    That is the point furthest below the line from the first to the last.

    >>> elbow(torch.tensor([9.0, 8.0, 2.0, 1.5, 1.0])), elbow(torch.ones(4))
    (2, 4)
    """
    first, last = float(values[0]), float(values[-1])
    if first - last <= _ALIKE * first:
        return len(values)
    line = torch.linspace(first, last, len(values), dtype=values.dtype)
    return max(1, int((line - values).argmax()))
