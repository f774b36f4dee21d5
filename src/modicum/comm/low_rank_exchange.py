"""Sums of gradients as products of two thin matrices: factors, what they leave, and their state.

What rank r leaves of a gradient M [n, m] is not lost: this rank adds it to the next update's as its
error E [n, m]. All sums are over ranks, not means, as everywhere here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modicum.comm.debts import LAYOUT, ROWS, regrouping
from modicum.comm.low_rank import LowRankMethod
from modicum.core.contracts.state import View
from modicum.core.random import normal_
from modicum.core.ranks.exchange import ExchangeContext
from modicum.core.ranks.matrix_exchange import GradientSum, MatrixExchange, TensorShape

FACTORS, OWED = "exchange", "owed"  # views of a run's state


class LowRankExchange(MatrixExchange):
    """Sums of gradients as products of thin factors, of which the errors are owed.

    What an update makes is staged: errors, factors and the number of updates change in `commit`,
    and not where a sum is not finite.
    """

    stateful = True
    method: LowRankMethod

    def __init__(self, method: LowRankMethod, context: ExchangeContext) -> None:
        super().__init__(context)
        self.method = self.value = method
        self._errors: dict[str, Tensor] = {}
        self._factors: dict[str, tuple[Tensor, Tensor]] = {}
        # By name: the matrix that this update compresses, what it leaves, its new factors.
        self._matrices: dict[str, Tensor] = {}
        self._shapes: dict[str, TensorShape] = {}
        self._staged: dict[str, tuple[Tensor, tuple[Tensor, Tensor]]] = {}
        self._paid: set[str] = set()

    # What a method does with one matrix

    @abstractmethod
    def send(self, name: str, matrix: Tensor) -> Tensor:
        """The factor of this rank's matrix [n, m] that is summed first."""

    @abstractmethod
    def rebuild(self, name: str, total: Tensor, second: Tensor | None) -> GradientSum:
        """The sum, of the factors that were summed; stages what follows for the next update."""

    def factors(self, name: str, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """P [n, r] and Q [m, r] of the last update; before the first, draws alike on all ranks.

        At a rank that has risen since then, what is new is drawn; at one that has fallen, the first
        columns are left.
        """
        rank = min(self._rank_now or 1, *matrix.shape)
        known = self._factors.get(name)
        if known is None or known[0].shape[1] != rank:  # a run may have been of another rank
            made = []
            for place, (side, rows) in enumerate(zip("PQ", matrix.shape, strict=True)):
                empty = torch.empty(rows, rank, dtype=matrix.dtype, device=matrix.device)
                normal_(empty, seed=self.context.seed, name=f"exchange/{name}/{side}")
                if known is not None:
                    kept = known[place][:, :rank]
                    empty[:, : kept.shape[1]] = kept
                made.append(empty)
            self._factors[name] = made[0], made[1]
        return self._factors[name]

    def shape(self, name: str) -> TensorShape:
        """The shape of a gradient that is compressed in this update."""
        return self._shapes[name]

    def stage(self, name: str, error: Tensor, factors: tuple[Tensor, Tensor]) -> None:
        """What the update leaves if it is made."""
        self._staged[name] = error, factors

    def staged(self, name: str) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """What was staged last in this update."""
        return self._staged[name]

    # The exchange

    @property
    def _rank_now(self) -> int | None:
        return self.method.rank_by_step.count_at(self.step)

    @property
    def _dense_now(self) -> bool:
        return self.peers == 1 or self._rank_now is None

    @torch.no_grad()
    def encode(self, name: str, gradient: Tensor) -> Tensor:
        shape = tuple(gradient.shape)
        if self._dense_now or not self.method.rank_of(shape):
            return self._with_owed(name, gradient)
        wide = torch.promote_types(gradient.dtype, torch.float32)
        matrix = gradient.detach().to(wide).flatten(1)
        owed = self._errors.get(name)
        # A copy in any case: the gradient's memory is not this one's to change.
        self._matrices[name] = matrix.clone() if owed is None else matrix + owed
        self._shapes[name] = shape
        return self.send(name, self._matrices[name])

    def _with_owed(self, name: str, gradient: Tensor) -> Tensor:
        """A gradient that travels as it is, with what is owed of it since it was compressed."""
        if (owed := self._errors.get(name)) is None:
            return gradient
        self._paid.add(name)
        return gradient + owed.view_as(gradient)

    @torch.no_grad()
    def decode(self, name: str, total: Tensor, second: Tensor | None) -> GradientSum:
        if name not in self._matrices:
            return super().decode(name, total, second)
        return self.rebuild(name, total, second)

    def forget(self, name: str) -> None:
        self._matrices.pop(name, None)
        self._staged.pop(name, None)
        self._paid.discard(name)

    def compressed(self, name: str) -> Tensor | None:
        """The matrix of this update, errors included; None where its gradient travels as it is."""
        return self._matrices.get(name)

    @torch.no_grad()
    def pay(self, name: str, gradient: Tensor) -> None:
        if (owed := self._errors.get(name)) is not None:
            gradient.add_(owed.view_as(gradient))
            self._paid.add(name)

    @torch.no_grad()
    def rescale(self, factor: float) -> None:
        for owed in self._errors.values():  # factors are orthogonalized before they are used
            owed.mul_(factor)

    def keep(self) -> None:
        for name in self._paid:
            del self._errors[name]
        for name, (error, factors) in self._staged.items():
            self._errors.pop(name, None)  # it was a part of this update
            if self.method.error_feedback:
                self._errors[name] = error
            self._factors[name] = factors

    def discard(self) -> None:
        super().discard()
        self._matrices.clear()
        self._shapes.clear()
        self._staged.clear()
        self._paid.clear()

    # State

    def held(self) -> list[Tensor]:
        return [*self._errors.values(), *(each for two in self._factors.values() for each in two)]

    def views(self) -> list[View]:
        """Factors and the number of updates, alike on all ranks; what each rank owes is its own."""
        return [
            View(FACTORS, self.state_dict, self.load_state_dict),
            View(
                OWED, self.owed, self.owe, per_rank=True,
                regroup=regrouping(self.peers, self.rows, means=self.means), suits=self._suits,
            ),
        ]  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """The number of updates and the factors."""
        return {"step": self.step, **({} if self.rows else self._named_factors())}

    def _named_factors(self) -> dict[str, Tensor]:
        return {
            f"{name}/{side}": each
            for name, two in self._factors.items()
            for side, each in zip("PQ", two, strict=True)
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them up."""
        self.discard()
        self.step, self._factors = int(state["step"]), {}
        if not self.rows:  # else they are each rank's own
            self._take_factors(state)

    def _take_factors(self, state: Mapping[str, Any]) -> None:
        for key in state:
            name, _, side = key.rpartition("/")
            if side == "P":
                p, q = (self._own(state[f"{name}/{each}"]) for each in "PQ")
                self._factors[name] = p, q

    def owed(self) -> dict[str, Any]:
        """What this rank owes, by the names of gradients; of rows of them, also of which."""
        if not self.rows:
            return dict(self._errors)
        own = {f"{name}{ROWS}": list(self.rows[name]) for name in self._errors}
        return {**self._errors, **own, **self._named_factors(), LAYOUT: self._layout}

    def owe(self, state: Mapping[str, Any]) -> None:
        """Take that up."""
        names = [name for name in state if isinstance(state[name], Tensor)]
        own = [name for name in names if not name.endswith(("/P", "/Q"))]
        self._errors = {name: self._own(state[name]) for name in own}
        self._take_factors(state)

    @property
    def _layout(self) -> list[int] | None:
        """How ranks share weights, where gradients are rows of them."""
        found = self.context.hybrid
        return [found.replicas, found.shards] if self.rows and found is not None else None

    def _suits(self, state: Mapping[str, Any]) -> bool:
        """Whether a state is of ranks that share weights as these do."""
        return state.get(LAYOUT) == self._layout

    def _own(self, value: Tensor) -> Tensor:
        return value.to(self.context.device_type, copy=True)


def orthogonal(matrix: Tensor) -> Tensor:
    """An orthonormal basis [n, r] of the columns of a matrix [n, r], n >= r.

    Of columns that depend on one another, or are zero, some basis that holds their span: finite,
    and the same on every rank that has the same matrix.
    """
    return torch.linalg.qr(matrix)[0]
