"""A layer's output where rows of one batch use different adapters, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modicum.adapters.adapter_layer import known
from modicum.core.errors import InputError


@dataclass(frozen=True)
class RowGroups:
    """Which adapter each row of a batch uses.

    Args:
        names: of each row; None: no adapter.
    """

    names: tuple[str | None, ...]

    @property
    def rows(self) -> dict[str | None, list[int]]:
        """The rows of each adapter.

        >>> RowGroups(("a", None, "a")).rows
        {'a': [0, 2], None: [1]}
        """
        found: dict[str | None, list[int]] = {}
        for row, name in enumerate(self.names):
            found.setdefault(name, []).append(row)
        return found

    def computed(
        self,
        inputs: Tensor,
        base: Callable[[Tensor], Tensor],
        adapted: Callable[[str | None, Tensor, Callable[[Tensor], Tensor]], Tensor],
        *,
        base_once: bool,
    ) -> Tensor:
        """A layer's output, row by row that of the row's own adapter.

        Args:
            inputs: [rows, ...].
            base: the layer without adapters.
            adapted: what an adapter makes of rows, given what the layer gives without it.
            base_once: whether `base` runs once for all rows, as it does not depend on adapters.

        Raises:
            InputError: there are other rows than names.
        """
        if inputs.ndim < 2 or inputs.shape[0] != len(self.names):
            problem = f"a layer is given {tuple(inputs.shape)}, whose first dimension is not a row"
            raise InputError(f"{problem} for each name", field="names", value=len(self.names))
        every = base(inputs) if base_once else None
        parts, order = list[Tensor](), list[int]()
        for name, rows in self.rows.items():
            index = torch.tensor(rows, device=inputs.device)
            own = inputs.index_select(0, index)
            given = base if every is None else known(own, every.index_select(0, index), base)
            parts.append(adapted(name, own, given))
            order += rows
        places = torch.tensor(order, device=inputs.device).argsort()
        return torch.cat(parts).index_select(0, places)


def check_names(names: Sequence[str | None], there: set[str]) -> None:
    """Make sure that there are names, and each is of an adapter on the model.

    Raises:
        InputError: they are not.
    """
    if not names:
        raise InputError("needs a name for each row of a batch", field="names")
    if unknown := sorted({name for name in names if name is not None} - there):
        allowed = ", ".join([*sorted(there), "None"])
        problem = "no adapter on this model has this name"
        raise InputError(problem, field="names", value=unknown[0], allowed=allowed)
