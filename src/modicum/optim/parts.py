"""What matrix optimizers are made of: a projector, a rule within, a rule for all that is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from modicum.core.layers.targets import named
from modicum.optim.projectors import MatrixShape, Projector
from modicum.optim.quantized import DTYPES, moment_bytes
from modicum.optim.rules import UpdateRule

COUNTER = 4  # bytes of the step counter that an optimizer keeps next to a parameter's moments
OnRefresh = Literal["keep", "reset", "rotate"]


@dataclass(frozen=True)
class OptimizerParts:
    """What a matrix optimizer is made of.

    Args:
        projector: of a matrix's gradient.
        inner: the rule in the projector's subspace.
        rest: the rule of all other parameters, whose moments are fp32, or bf16 where `bits` is 16.
        scale: alpha, a factor on the inner rule's update.
        update_gap: T, steps between two refreshes of the projector.
        on_refresh: what becomes of moments in the old basis: `keep` leaves the numbers as they
            are, `reset` begins anew, `rotate` turns them into the new basis.
        stagger: whether matrices are refreshed one after the other, spread over the T steps.
        bits: of an element of the inner rule's moments, 32, 16 (bf16) or 8.
        exclude: names of parameters that are no matrices; patterns, or a name's last parts.
    """

    projector: Projector
    inner: UpdateRule
    rest: UpdateRule
    scale: float = 1.0
    update_gap: int = 200
    on_refresh: OnRefresh = "keep"
    stagger: bool = False
    bits: int = 32
    exclude: tuple[str, ...] = ()

    @property
    def rest_dtype(self) -> torch.dtype:
        """What the rest rule's moments are kept in."""
        return DTYPES.get(self.bits, torch.float32)

    def takes(self, name: str | None, shape: Sequence[int], matrix: bool) -> bool:
        """Whether a parameter is a matrix for the projector; else it gets the rest rule."""
        excluded = name is not None and named(name, self.exclude)
        return matrix and not excluded and self.projector.fits(tuple(shape))

    def kept_bytes(self, shape: MatrixShape) -> int:
        """Bytes that are kept for a matrix, exactly."""
        rows, columns = self.projector.inner(shape)
        moments = len(self.inner.moments) * moment_bytes(rows * columns, self.bits)
        bases = sum(a * b for a, b in self.projector.bases(shape).values())
        return COUNTER + self.projector.element_bytes * bases + moments
