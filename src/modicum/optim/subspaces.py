"""The update of one matrix: down into a subspace, a rule there, and up again.

What the gradient has outside of the subspace is dropped, or takes a step of its own without state,
or is carried over to the next step. The subspace changes every so many steps; what of the old one
is not needed is freed before anything new is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from modicum.core.errors import InputError
from modicum.optim.agreement import Late, first_ones
from modicum.optim.blocks import BlockRule
from modicum.optim.kept import opened
from modicum.optim.parts import OptimizerParts
from modicum.optim.projectors import MatrixShape


def since_refresh(parts: OptimizerParts, step: int, place: int, count: int) -> int:
    """Steps since the last change of the subspace of matrix `place` of `count`, due at 0."""
    gap = parts.update_gap
    early = place * gap // count if parts.stagger else 0
    return min(step, (step + early) % gap)


def is_active(parts: OptimizerParts, step: int, place: int, count: int) -> bool:
    """Whether matrix `place` of `count` has moments in its step number `step`."""
    choice = parts.choice
    return choice is None or place in choice.active(count, step // parts.update_gap)


def drop_moments(parts: OptimizerParts, state: dict[str, Any], shape: MatrixShape) -> None:
    """Free what the inner rule keeps for a matrix."""
    for name in parts.inside(shape):
        state.pop(name, None)
        state.pop(f"{name}_scale", None)


def renew_moments(parts: OptimizerParts, state: dict[str, Any], shape: MatrixShape) -> None:
    """Set what the inner rule keeps for a matrix to zero; of codes, their scales."""
    for name in parts.inside(shape):
        kept = state.get(f"{name}_scale", state.get(name))
        if kept is not None:
            kept.zero_()


@dataclass(frozen=True)
class SubspaceStep:
    """A step of one matrix, by the rank that owns it.

    Args:
        parts: what the optimizer is made of.
        state: the matrix's; `step` counts its steps.
        place, count: its number among all matrices, and how many there are.
        same: the ranks that take this step too, whose bases must be the first one's; None: nobody.
        late: takes up what of the state they must have alike, but not before the next step.
    """

    parts: OptimizerParts
    state: dict[str, Any]
    place: int
    count: int
    same: dist.ProcessGroup | None = None
    late: Late = field(default_factory=dict)

    def update(self, gradient: Tensor) -> Tensor:
        """What the matrix is to lose, without the learning rate: fp32, a tensor of its own.

        Args:
            gradient: the full one, fp32 [m, n]; it stays as it is.

        Raises:
            InputError: a gradient to find a subspace of is not finite.
        """
        parts, state = self.parts, self.state
        shape = gradient.shape[0], gradient.shape[1]
        step = int(state["step"])
        since = since_refresh(parts, step, self.place, self.count)
        due = since == 0 and bool(parts.projector.bases(shape))
        if due or (step == 0 and isinstance(parts.inner, BlockRule)):
            _demand_finite(gradient)
        # Zeros have no subspace, and what is found for them must not be kept for T steps: the next
        # step looks again. A factor of an adapter begins so where the other factor is zero.
        blank = due and step == 0 and not bool(gradient.any())
        if blank and parts.projector.bases(shape).keys() <= state.keys():
            due = False  # what the step before has found for zeros is as good
        active = is_active(parts, step, self.place, self.count)
        if since == 0 and parts.on_refresh == "reset":
            (renew_moments if active else drop_moments)(parts, state, shape)
        if not active:
            state["step"] += 1
            return self._beyond(gradient.clone(memory_format=torch.contiguous_format))
        total = gradient
        if parts.carried is not None:
            total = parts.carried.open(state, shape, gradient).add_(gradient)
        inside = self._refresh(total, step) if due else parts.projector.down(total, state)
        state["step"] += int(not blank)
        left: Tensor | None = None
        if parts.carried is not None:
            left = parts.projector.outside(total, inside, state)
            keep = parts.carried.keep
            parts.carried.close(state, total.lerp_(left, 1 - keep) if keep else left)
            del left, total
        age = since + 1 if parts.on_refresh == "reset" else step + 1
        with self._moments(shape, gradient.device) as moments:
            direction, factor = self._direction(inside, moments, age)
            if parts.within is not None:
                direction = direction.clone()
                parts.within.apply_([direction])
        self._note_late(age)
        update = parts.projector.up(direction, state, shape).mul_(factor * parts.scale)
        del direction
        if parts.outside != "nothing":
            update.add_(self._beyond(parts.projector.outside(gradient, inside, state)))
        return update

    def _direction(
        self, inside: Tensor, moments: Mapping[str, Tensor], age: int
    ) -> tuple[Tensor, float]:
        """The inner rule's direction and factor."""
        rule = self.parts.inner
        if not isinstance(rule, BlockRule):
            return rule.direction(inside, moments, age)
        return rule.direction_at(inside, moments, age, self.place)

    def _note_late(self, age: int) -> None:
        """What a rule of blocks has decomposed is not used before the next step."""
        rule = self.parts.inner
        if self.same is not None and isinstance(rule, BlockRule):
            names = (key for name in rule.agreed(age) for key in (name, f"{name}_scale"))
            found = [self.state[key] for key in names if key in self.state]
            self.late.setdefault(self.same, []).extend(found)

    def _beyond(self, left: Tensor) -> Tensor:
        """The step, without state, of what is outside of the subspace; `left` is given up."""
        if self.parts.outside == "nothing":
            return left.zero_()
        if self.parts.outside == "sign":
            left.sign_()
        return left if self.parts.outside_scale == 1 else left.mul_(self.parts.outside_scale)

    def _refresh(self, total: Tensor, step: int) -> Tensor:
        """Change the subspace, and what moments are in; return what is inside of it."""
        parts, state = self.parts, self.state
        shape = total.shape[0], total.shape[1]
        names = parts.projector.bases(shape)
        old = {name: state.pop(name) for name in names if name in state}
        if parts.on_refresh != "rotate":
            old.clear()
        bases, inside = parts.projector.refresh(total, step, self.place)
        if self.same is not None and first_ones(list(bases.values()), self.same):
            inside = parts.projector.down(total, bases)
        state.update(bases)
        if old:
            kept = parts.inside(shape)
            with self._moments(shape, total.device) as moments:
                for name, moment in moments.items():
                    squared = kept[name].squared
                    moment.copy_(parts.projector.turn(moment, old, bases, squared=squared))
        return inside

    def _moments(self, shape: MatrixShape, device: torch.device) -> Any:
        return opened(self.state, self.parts.inside(shape), device, self.parts.bits)


def _demand_finite(gradient: Tensor) -> None:
    if not bool(gradient.isfinite().all()):
        raise InputError(
            "a gradient is not finite, so it has no subspace; a lower learning rate may help, "
            "or clipping",
            value=tuple(gradient.shape),
        )
