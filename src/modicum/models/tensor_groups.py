"""Tensors of a file before they are written: how large they are, and how they are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from modicum.core.errors import InputError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of a file that are made together.

    Args:
        shapes: of each, by its name in the file.
        itemsize: bytes of a number.
        make: makes them; where weights are sharded over ranks, every rank calls it.
        unrounded: names of those that are in fp32 at least, whatever the others are rounded to.
    """

    shapes: Mapping[str, tuple[int, ...]]
    itemsize: int
    make: Callable[[], Mapping[str, torch.Tensor]]
    unrounded: frozenset[str] = frozenset()

    @property
    def bytes(self) -> int:
        """Of all of them."""
        wide = max(4, self.itemsize)
        return sum(
            math.prod(shape) * (wide if name in self.unrounded else self.itemsize)
            for name, shape in self.shapes.items()
        )

    def rounded(self, dtype: torch.dtype) -> TensorGroup:
        """The same in another dtype than their own; `make` refuses what is beyond it."""
        made, unrounded = self.make, self.unrounded

        def make() -> Mapping[str, torch.Tensor]:
            return {
                name: tensor if name in unrounded else _rounded(name, tensor, dtype)
                for name, tensor in made().items()
            }

        return TensorGroup(self.shapes, dtype.itemsize, make, unrounded)


def _rounded(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    made = tensor.to(dtype)
    if tensor.isfinite().all() and not made.isfinite().all():
        raise InputError(
            f"the weight {name} is beyond what this can hold",
            field="export.dtype",
            value=str(dtype).removeprefix("torch."),
            allowed="float32, bfloat16",
        )
    return made


def dense_weight(module: torch.nn.Module, dtype: torch.dtype) -> torch.Tensor:
    """The full weight of a layer: its own, or the one that its form represents.

    Args:
        dtype: of what a quantized one becomes.
    """
    from modicum.core.layers.linear_forms import form_of
    from modicum.core.ranks.sharding import whole

    form = form_of(module)
    if form is None:
        return whole(module.get_parameter("weight").detach())
    weight = whole(form.to_dense(module).detach())
    return weight if form.trains else weight.to(dtype)
