"""The value of an optimizer, derived from the signature of its class.

Optimizers stay classes of `torch.optim.Optimizer`, so that any training loop takes them. What a
recipe spells, the catalog reads and the planner asks is a `Method` like any other: its fields are
the keywords of `__init__(self, params, lr=..., *, ...)`. The learning rate is none of them; it
comes with the parameter groups. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import create_model

from modicum.core.contracts.method import Info, Method
from modicum.core.contracts.search import SearchTable
from modicum.core.errors import InputError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from modicum.core.contracts.ledger import ClassTreatment, Ledger, OptimizerQuery
    from modicum.core.contracts.step import StepContext, StepProgram


class OptimizerMethod(Method):
    """The value of an optimizer, whose class is `optimizer_class`; fields are its keywords."""

    optimizer_class: ClassVar[Any]

    def bind(self, context: Iterable[dict[str, object]]) -> Optimizer:  # type: ignore[override]
        """The optimizer over these parameter groups, as `optimizer_groups` makes them."""
        optimizer: Optimizer = self.optimizer_class(context, **self.fields())
        return optimizer

    def bind_step(self, context: StepContext) -> StepProgram:
        """The program that steps the optimizer: the standard one, unless its class names another.

        An optimizer's class may have `step_program(value, context, optimizer)`.
        """
        from modicum.core.contracts.step import StandardStep

        optimizer = self.bind(context.groups(getattr(self, "weight_decay", 0.0)))
        make = getattr(self.optimizer_class, "step_program", None)
        if make is None:
            return StandardStep(context, optimizer)
        program: StepProgram = make(self, context, optimizer)
        return program

    def ledger(self, at: OptimizerQuery) -> Ledger:
        """What its state, the gradients and a step take, of the rank that has most."""
        spends = getattr(self.optimizer_class, "spends", None)
        if spends is None:
            raise TypeError(f"{type(self).__name__} defines no spends(value, at)")
        ledger: Ledger = spends(self, at)
        return ledger

    def treats(self, at: OptimizerQuery) -> tuple[ClassTreatment, ...]:
        """What it does with each class of parameters; nothing, where it treats all alike.

        An optimizer's class may have `treatment(value, at)`.
        """
        treatment = getattr(self.optimizer_class, "treatment", None)
        found: tuple[ClassTreatment, ...] = () if treatment is None else treatment(self, at)
        return found

    @property
    def reads_heads(self) -> bool:
        """Whether it wants the heads in fused layers too, which take a map to find.

        An optimizer's class may say so by `reads_heads`.
        """
        return bool(getattr(self.optimizer_class, "reads_heads", False))

    def projects(self, at: OptimizerQuery) -> dict[str, int]:
        """The matrices that it would project to its field `rank`, each with its smaller width.

        An optimizer's class may have `projected(value, at)`. Nothing, where it projects none.
        """
        projected = getattr(self.optimizer_class, "projected", None)
        found: dict[str, int] = {} if projected is None else projected(self, at)
        return found

    def rounds_away(self, at: OptimizerQuery) -> dict[str, int]:
        """The matrices of which its field `density` is less than half of one of their parts.

        Each with how many parts it has, of which one is taken all the same. An optimizer's class
        may have `rounded_away(value, at)`. Nothing, where it takes no part.
        """
        rounded = getattr(self.optimizer_class, "rounded_away", None)
        found: dict[str, int] = {} if rounded is None else rounded(self, at)
        return found

    def fields(self) -> dict[str, Any]:
        """The fields by name."""
        return {name: getattr(self, name) for name in type(self).model_fields}


class Valued:
    """Put before an optimizer's base class: `value(...)` is what a recipe takes.

    >>> from modicum.optim import AdamW
    >>> value = AdamW.value(weight_decay=0.1)
    >>> value.weight_decay, value.info.name
    (0.1, 'adamw')
    """

    info: ClassVar[Info]
    search: ClassVar[SearchTable | None] = None

    @classmethod
    def value(cls, **fields: Any) -> OptimizerMethod:
        """The value with these hyper-parameters, and defaults for the rest.

        Raises:
            InputError: a field is unknown, of the wrong type or out of bounds.
        """
        kind: type = cls
        return value_class(kind)(**fields)


@functools.cache
def value_class(kind: type) -> type[OptimizerMethod]:
    """The class of an optimizer's values, built once.

    Raises:
        InputError: the class has no `info`, its `__init__` is not `(self, params, lr, *, ...)`, or
            a keyword has a name that values have already.
    """
    parameters = list(inspect.signature(kind).parameters.values())
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if names != ["params", "lr"] or not isinstance(getattr(kind, "info", None), Info):
        raise InputError(
            "an optimizer that is a method has an `info` and __init__(self, params, lr, *, ...)",
            value=kind.__qualname__,
        )
    taken = next((p.name for p in keywords if hasattr(OptimizerMethod, p.name)), None)
    if taken is not None:
        raise InputError("every value has something of this name; call it otherwise", field=taken)
    hints = typing.get_type_hints(kind.__init__, include_extras=True)  # type: ignore[misc]
    fields: dict[str, Any] = {
        p.name: (hints[p.name], ... if p.default is p.empty else p.default) for p in keywords
    }
    made: type[OptimizerMethod] = create_model(
        kind.__name__,
        __base__=OptimizerMethod,
        __module__=kind.__module__,
        __doc__=kind.__doc__,
        **fields,
    )
    made.info, made.optimizer_class = kind.info, kind  # type: ignore[attr-defined]
    made.search = getattr(kind, "search", None)
    return made
