"""What an optimizer keeps of parameters whose shape changes, and who keeps it afterwards.

Tensors of a parameter's shape, or with its rows, move with the rows. Anything else, such as moments
in a subspace, says nothing of the new shape: for that parameter the optimizer begins anew. Full
tensors, which the owner of a matrix alone keeps, are sent to whoever owns it afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modicum.core.contracts.row_meanings import RowedState
from modicum.core.contracts.state import WholeState
from modicum.core.contracts.surgery import RowMap, Shape, mapped_shape
from modicum.core.ranks.ranks import Ranks


def moving(
    optimizer: Any,
    entries: Mapping[str, Any],
    rows: Mapping[str, tuple[RowMap, ...]],
    shapes: Mapping[str, Shape],
) -> tuple[set[str], set[str]]:
    """Of an optimizer's entries those with rows in another shape, and those that are lost.

    Args:
        entries: its state as `optimizer_view` reads it.
        rows: the maps of the parameters that change.
        shapes: of the parameters as they are now.
    """
    if not isinstance(optimizer, RowedState):
        return set(), set()
    parameters, rowed, lost = _named(optimizer), set(), set()
    for key, value in entries.items():
        name, _, kept = key.rpartition("/")
        if name not in rows or not isinstance(value, Tensor) or value.numel() == 1:
            continue
        parameter, maps = parameters[name], rows[name]
        if not optimizer.keeps_alike(parameter, mapped_shape(shapes[name], maps)):
            lost.add(name)
        elif tuple(value.shape) != shapes[name]:
            moves = kept in optimizer.rowed(parameter) and all(m.dimension == 0 for m in maps)
            rowed.add(key) if moves else lost.add(name)
    return rowed, {key for key in entries if key.rpartition("/")[0] in lost}


def hand_over(held: dict[str, Any], optimizer: Any, ranks: Ranks) -> None:
    """Send the state of matrices, which one rank held, to those that own them now.

    Every rank calls this, with what it held; one tensor is on its way at a time.
    """
    if not isinstance(optimizer, WholeState):
        return
    parameters = _named(optimizer)
    kept = {name for name, one in parameters.items() if optimizer.keeps_whole(one)}
    own = {key: value for key, value in held.items() if key.rpartition("/")[0] in kept}
    there = ranks.gather({key: [_word(value), list(value.shape)] for key, value in own.items()})
    takers = ranks.gather([name for name in sorted(kept) if optimizer.holds(parameters[name])])
    for key in sorted(set().union(*there)):
        name = key.rpartition("/")[0]
        if all(key in has for has, names in zip(there, takers, strict=True) if name in names):
            continue
        source = next(rank for rank, has in enumerate(there) if key in has)
        word, shape = there[source][key]
        value = ranks.broadcast_tensor(held.get(key), shape, getattr(torch, word), source)
        if name in takers[ranks.rank]:
            held[key] = value


def _word(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _named(optimizer: Any) -> dict[str, Tensor]:
    return {
        name: parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"], strict=True)
    }
