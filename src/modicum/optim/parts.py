"""What matrix optimizers are made of: a projector, a rule within, a rule for all that is left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor

from modicum.core.contracts.ledger import ParameterClass, TrainedParameter
from modicum.core.layers.targets import named
from modicum.optim.carried import CarriedOver
from modicum.optim.kept import DTYPES, KeptTensor, StateShape, state_shapes
from modicum.optim.projectors import FullSpace, MatrixShape, Projector
from modicum.optim.rules import UpdateRule
from modicum.optim.selections import TensorChoice

COUNTER = 4  # bytes of the step counter that an optimizer keeps next to a parameter's moments
# Elements of the updates that are finished together at most, unless one alone has more: enough that
# a batch of small matrices keeps an accelerator busy, and little memory next to a model's.
TOGETHER = 2**21
OnRefresh = Literal["keep", "reset", "rotate"]
OutsideRule = Literal["nothing", "sign", "plain"]
# How sharded matrices are taken: each in full by an owner, or by every rank its rows, with sums
# over all rows where the rule asks for these, see `modicum.optim.row_steps`.
TakenAs = Literal["full", "rows"]


class MatrixMap(Protocol):
    """A map of full update matrices, of which several of one shape are mapped at once."""

    def apply_(self, matrices: Sequence[Tensor]) -> None:
        """Map matrices [m, n] of one shape (fp32) in place."""
        ...

    def flops(self, shape: MatrixShape) -> int:
        """Operations of the matrix products that a matrix takes."""
        ...

    def scratch_elements(self, shape: MatrixShape) -> int:
        """Elements of fp32 in addition to a matrix while it is mapped, at most."""
        ...

    def batches(self, device: str) -> bool:
        """Whether the matrices of a call are mapped at once there, and not one after the other."""
        ...


def _alike(rows: int, columns: int) -> float:
    return 1.0


@dataclass(frozen=True)
class OptimizerParts:
    """What a matrix optimizer is made of.

    Args:
        projector: of a matrix's gradient.
        inner: the rule in the projector's subspace.
        rest: the rule of all other parameters, whose moments are fp32, or bf16 where `bits` is 16.
        within: a map of the inner rule's direction, before it comes up from the subspace.
        scale: alpha, a factor on the inner rule's update.
        choice: which matrices are active, a round of `update_gap` steps at a time; the others have
            no moments, and all of their gradient is outside. None: all are.
        outside: what becomes of the gradient outside of the subspace: `nothing`, or an update
            without state, its `sign` or `plain` itself.
        outside_scale: a factor on that update.
        carried: what the subspace leaves of the gradient is added to the next one.
        update_gap: T, steps between two refreshes of the projector.
        on_refresh: what becomes of moments in the old basis: `keep` leaves the numbers as they
            are, `reset` begins anew, `rotate` turns them into the new basis.
        stagger: whether matrices are refreshed one after the other, spread over the T steps.
        bits: of an element of the inner rule's moments, 32, 16 (bf16) or 8.
        exclude: names of parameters that are no matrices; patterns, or a name's last parts.
        classes: of the parameters that it takes, those that fit the projector.
        finish: a map of the full update, which all matrices of one shape go through together.
        shape_factor: a factor on the update by the matrix's rows and columns.
        rest_rate: the rest rule's learning rate, of the group's.
        rest_decay: the rest rule's weight decay, of the group's.
        decay: whether weights decay before the update, as in `torch.optim.AdamW`, or after it.
        taken_as: how sharded matrices are taken; all else is taken by rows.
        rule_of: the rule of a parameter that is taken by rows, where there are more than two.
    """

    projector: Projector
    inner: UpdateRule
    rest: UpdateRule
    scale: float = 1.0
    within: MatrixMap | None = None
    choice: TensorChoice | None = None
    outside: OutsideRule = "nothing"
    outside_scale: float = 1.0
    carried: CarriedOver | None = None
    update_gap: int = 200
    on_refresh: OnRefresh = "keep"
    stagger: bool = False
    bits: int = 32
    exclude: tuple[str, ...] = ()
    classes: tuple[ParameterClass, ...] = ("matrix",)
    finish: MatrixMap | None = None
    shape_factor: Callable[[int, int], float] = _alike
    rest_rate: float = 1.0
    rest_decay: float = 1.0
    decay: Literal["before", "after"] = "before"
    taken_as: TakenAs = "full"
    rule_of: Callable[[TrainedParameter], UpdateRule] | None = None

    @classmethod
    def alike(cls, rule: UpdateRule, **fields: Any) -> Self:
        """One rule for all parameters, none of which is a matrix in particular."""
        return cls(FullSpace(), rule, rule, classes=(), taken_as="rows", **fields)

    @property
    def rest_bits(self) -> int:
        """Bits of an element of the rest rule's moments."""
        return 16 if self.bits == 16 else 32

    @property
    def rest_dtype(self) -> torch.dtype:
        """What the rest rule's moments are kept in."""
        return DTYPES[self.rest_bits]

    def takes(
        self, name: str | None, shape: Sequence[int], parameter_class: ParameterClass
    ) -> bool:
        """Whether a parameter is a matrix for the projector; else it gets the rest rule."""
        return self.meant(name, parameter_class) and self.projector.fits(tuple(shape))

    def meant(self, name: str | None, parameter_class: ParameterClass) -> bool:
        """Whether a parameter is for the projector, as far as its name and class tell."""
        excluded = name is not None and named(name, self.exclude)
        return parameter_class in self.classes and not excluded

    def inside(self, shape: MatrixShape) -> Mapping[str, KeptTensor]:
        """What the inner rule keeps for a matrix of this shape."""
        return self.inner.state(self.projector.inner(shape))

    def kept_bytes(self, shape: MatrixShape) -> int:
        """Bytes that are kept for a matrix, exactly; where there is a choice, of an active one."""
        moments = sum(kept.nbytes(self.bits) for kept in self.inside(shape).values())
        bases = sum(basis.nbytes(32) for basis in self.projector.bases(shape).values())
        carried = 0 if self.carried is None else self.carried.nbytes(shape)
        return COUNTER + bases + moments + carried

    def state_shapes(self, shape: Sequence[int], rule: UpdateRule | None) -> dict[str, StateShape]:
        """What is kept of a parameter of this shape, next to the count of its steps.

        Args:
            rule: by which it is updated by rows; None: an owner takes it in full.
        """
        if rule is not None:
            return state_shapes(rule.state(tuple(shape)), self.rest_bits)
        matrix = shape[0], shape[1]
        found = state_shapes(self.inside(matrix), self.bits)
        found |= state_shapes(self.projector.bases(matrix), 32)
        if self.carried is not None:
            found |= state_shapes(self.carried.state(matrix), 32)
        return found

    def row_rule(self, parameter: TrainedParameter, taken: bool | None = None) -> UpdateRule | None:
        """The rule by which a parameter is updated by rows; None: an owner takes it in full.

        Args:
            taken: whether it is a matrix for the projector; None: as `takes` says.
        """
        if taken is None:
            taken = self.takes(parameter.name or None, parameter.shape, parameter.parameter_class)
        if taken and self.taken_as == "full":
            return None
        if self.rule_of is not None:
            return self.rule_of(parameter)
        return self.inner if taken else self.rest
