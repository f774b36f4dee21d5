"""What ranks owe, when their number changes: the sum over ranks stays, or their mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

ROWS, LAYOUT = "@rows", "@layout"  # next to what a rank owes of rows of gradients
TURNED = "@turned"  # of which matrices the factors take turns the other way round


def regrouping(
    peers: int, rows: Mapping[str, tuple[int, int, int]], *, means: bool = False
) -> Callable[[Sequence[Mapping[str, Any]]], dict[str, Tensor]]:
    """Makes a rank's debts of those of all old ranks: an equal share.

    Their sum stays, or where gradients are means over the ranks, their mean.

    Args:
        peers: how many ranks will sum a gradient.
        rows: which rows of a parameter the gradients of this rank are, if they are no full ones.
        means: whether sums are made means, so that of more ranks each has a smaller part.

    >>> import torch
    >>> old = [{"weight": torch.tensor([1.0])}, {"weight": torch.tensor([2.0])}, {}]
    >>> regrouping(2, {})(old)["weight"].tolist()
    [1.5]
    >>> regrouping(2, {}, means=True)(old)["weight"].tolist()
    [1.0]
    """

    def regroup(states: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        totals: dict[str, Tensor] = {}
        for state in states:
            for name in state:
                if name in (LAYOUT, TURNED) or name.endswith((ROWS, "/P", "/Q")):
                    continue
                value = state[name]
                if name not in totals:
                    known = state[f"{name}{ROWS}"][2] if f"{name}{ROWS}" in state else len(value)
                    totals[name] = value.new_zeros(known, *value.shape[1:])
                first = state[f"{name}{ROWS}"][0] if f"{name}{ROWS}" in state else 0
                totals[name][first : first + len(value)] += value
        parts = len(states) if means else peers
        if not rows:
            return {name: total / parts for name, total in totals.items()}
        own = {name: rows[name] for name in totals if name in rows}
        return {name: totals[name][first:end] / parts for name, (first, end, _) in own.items()}

    return regroup
