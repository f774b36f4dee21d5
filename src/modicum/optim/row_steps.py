"""Updates that a rank makes of its own rows, with sums over all rows where a rule needs them.

Where parameters are sharded along dimension 0, a rule that looks at elements or rows one by one
needs nothing of the others. One that needs a few numbers of the full tensor (`SummingRule`) gives
its rows' sums; those of all parameters are added up over the ranks in one all-reduce. Nothing else
is sent, and no rank has a full tensor.

On a CPU a parameter is updated four megabytes at a time: what a step reads and makes of these rows
is in the cache then, so that memory is passed once and not at each operation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modicum.core.ranks.ranks import peer_errors
from modicum.core.ranks.sharding import cut_alike, is_sharded, own_part
from modicum.optim.kept import KeptTensor
from modicum.optim.owners import Cut
from modicum.optim.rules import RowRange, SummingRule, UpdateRule

CACHED = 1 << 20  # elements that are updated together on a CPU


def wide(tensor: Tensor) -> Tensor:
    """A tensor in the precision of updates: fp32, or fp64 where it has that."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def by_rows(kept: KeptTensor, shape: Sequence[int]) -> bool:
    """Whether a rule's tensor is sharded as its parameter is: rows of it belong to rows there.

    It has the parameter's shape, or is a matrix of as many rows. Anything else is kept in full.
    """
    rowed = len(kept.shape) == 2 and list(shape[:1]) == [kept.shape[0]]
    return rowed or kept.shape == tuple(shape)


def rows_together(rule: UpdateRule, shape: Sequence[int], device: str) -> int:
    """How many rows of a parameter of this shape a step updates at a time.

    All, on an accelerator, where starting a kernel costs more than the cache saves; and where a
    rule keeps what belongs to no row.
    """
    rows, width = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    if device != "cpu" or not all(by_rows(k, shape) for k in rule.state(tuple(shape)).values()):
        return max(1, rows)
    return max(1, min(rows, CACHED // max(1, width)))


@dataclass
class RowUpdate:
    """One parameter's update, on this rank's rows or on some of them.

    Args:
        state: the optimizer's, of the parameter.
        bits: of an element of what is kept: 32 or 16.
        some: which of the rows that are here; None: all.
    """

    parameter: nn.Parameter
    rule: UpdateRule
    state: dict[str, Any]
    bits: int
    some: slice | None = None

    def pieces(self) -> Iterator[RowUpdate]:
        """The same update, as many rows at a time as a step takes together."""
        (own, _), shape = own_part(self.parameter), tuple(self.parameter.shape)
        most = rows_together(self.rule, shape, own.device.type)
        if not shape or len(own) <= most:
            yield self
            return
        for first in range(0, len(own), most):
            piece = replace(self, some=slice(first, first + most))
            piece.__dict__["held"] = self.held
            yield piece

    @property
    def weight(self) -> Tensor:
        """These rows of the parameter."""
        return self._of(own_part(self.parameter)[0])

    @property
    def rows(self) -> RowRange:
        """Which rows these are."""
        before = own_part(self.parameter)[1] + (self.some.start if self.some else 0)
        return RowRange(tuple(self.parameter.shape), before)

    @property
    def gradient(self) -> Tensor:
        """The gradient of these rows."""
        assert self.parameter.grad is not None
        return wide(self._of(own_part(self.parameter.grad)[0]))

    def _of(self, own: Tensor) -> Tensor:
        return own if self.some is None else own[self.some]

    @functools.cached_property
    def held(self) -> dict[str, Tensor]:
        """This rank's part of all that is kept."""
        kept = self.rule.state(tuple(self.parameter.shape))
        return {name: self._held(name, one) for name, one in kept.items()}

    def begin(self) -> int:
        """Count the step: how many gradients the state has seen, this one included."""
        if "step" not in self.state:
            self.state["step"] = torch.zeros(())
        self.state["step"] += 1
        return int(self.state["step"])

    @contextmanager
    def moments(self) -> Iterator[dict[str, Tensor]]:
        """These rows of what is kept, to be changed in place."""
        held = {name: self._of(tensor) for name, tensor in self.held.items()}
        found = {
            name: wide(tensor) if tensor.is_floating_point() else tensor
            for name, tensor in held.items()
        }
        yield found
        for name, tensor in held.items():
            if found[name] is not tensor:
                tensor.copy_(found[name])

    def _held(self, name: str, kept: KeptTensor) -> Tensor:
        """This rank's part of a tensor in the state, made or laid out anew where it must be."""
        state, like = self.state, self.parameter
        dtype = kept.held(self.bits)
        if dtype == torch.float32 and like.dtype == torch.float64:
            dtype = torch.float64
        before = state.get(name)
        if kept.shape == tuple(like.shape):
            if before is None:
                state[name] = torch.zeros_like(
                    like, dtype=dtype, memory_format=torch.contiguous_format
                )
        elif by_rows(kept, like.shape):
            (part, first), columns = own_part(like), kept.shape[1]
            if before is None:
                before = torch.zeros(len(part), columns, dtype=dtype, device=part.device)
                state[name] = cut_alike(before, like, columns)
            elif is_sharded(like) and not is_sharded(before):
                # A checkpoint that is taken up gives all rows.
                state[name] = cut_alike(before[first : first + len(part)].clone(), like, columns)
        elif before is None:
            state[name] = torch.zeros(kept.shape, dtype=dtype, device=own_part(like)[0].device)
        state[name] = state[name].to(dtype)  # of a state that was saved by other fields
        return own_part(state[name])[0]


Apply = Callable[[RowUpdate, Tensor, float], None]


def step_rows(updates: Sequence[RowUpdate], apply: Apply) -> None:
    """Find the directions of these parameters' rows and give each to `apply`, with its factor.

    Ranks that share rows call this with the same parameters in the same order.
    """
    waiting: list[tuple[RowUpdate, SummingRule, int, Tensor]] = []
    for one in updates:
        age, rule = one.begin(), one.rule
        if isinstance(rule, SummingRule):
            alone = Cut.of(one.parameter).group is None and not rule.over_all
            if not alone and rule.numbers(tuple(one.parameter.shape)):
                waiting.append((one, rule, age, _sums_of(one, rule, age)))
                continue
        _finish(one, age, None, apply)
    found = _summed([(Cut.of(one.parameter).group, sums) for one, _, _, sums in waiting])
    together = [sums for (_, rule, _, _), sums in zip(waiting, found, strict=True) if rule.over_all]
    for (one, rule, age, _), own in zip(waiting, found, strict=True):
        _finish(one, age, torch.stack(together).sum(0) if rule.over_all else own, apply)


def _sums_of(one: RowUpdate, rule: SummingRule, age: int) -> Tensor:
    """A rule's sums over this rank's rows."""
    total: Tensor | None = None
    for piece in one.pieces():
        with piece.moments() as moments:
            sums = rule.sums(piece.gradient, moments, age, piece.rows)
        total = sums if total is None else total + sums
    assert total is not None
    return total


def _finish(one: RowUpdate, age: int, sums: Tensor | None, apply: Apply) -> None:
    """Apply one direction, which is gone before the next is there."""
    rule = one.rule
    if isinstance(rule, SummingRule) and sums is None:
        sums = _sums_of(one, rule, age)
    for piece in one.pieces():
        _finish_piece(piece, age, sums, apply)


def _finish_piece(one: RowUpdate, age: int, sums: Tensor | None, apply: Apply) -> None:
    rule, gradient = one.rule, one.gradient
    with one.moments() as moments:
        if isinstance(rule, SummingRule):
            assert sums is not None
            apply(one, *rule.direction_by(gradient, moments, age, one.rows, sums))
        else:
            apply(one, *rule.direction(gradient, moments, age))


def _summed(own: Sequence[tuple[dist.ProcessGroup | None, Tensor]]) -> list[Tensor]:
    """Each tensor of sums added up over its group: one all-reduce for all that share a group."""
    found = [sums for _, sums in own]
    groups = {group: None for group, _ in own if group is not None}
    for group in groups:
        places = [place for place, (other, _) in enumerate(own) if other is group]
        flat = torch.cat([found[place].flatten() for place in places])
        with peer_errors():
            dist.all_reduce(flat, group=group)
        pieces = flat.split([found[place].numel() for place in places])
        for place, piece in zip(places, pieces, strict=True):
            found[place] = piece.view_as(found[place])
    return found


def row_bytes(
    rule: UpdateRule, shape: Sequence[int], rows: int, bits: int, element_bytes: int
) -> int:
    """Bytes that a rule keeps for so many rows of a parameter of this shape."""
    total = 0
    for kept in rule.state(tuple(shape)).values():
        if element_bytes == 8 and kept.dtype == torch.float32:
            kept = replace(kept, dtype=torch.float64)
        if shape and by_rows(kept, shape):
            kept = replace(kept, shape=(rows, *kept.shape[1:]))
        total += kept.nbytes(bits)
    return total


def opened_bytes(rule: UpdateRule, shape: Sequence[int], rows: int, bits: int) -> int:
    """Bytes of fp32 copies of what a rule keeps for so many rows of a parameter."""
    kept = rule.state(tuple(shape)).values()
    own = (
        replace(k, shape=(rows, *k.shape[1:])) if shape and by_rows(k, shape) else k for k in kept
    )
    return sum(one.copied(bits) for one in own)
