"""What a subspace leaves of a gradient, carried over to the next step: error feedback, momentum.

It has the shape of the full matrix. As error feedback it is small numbers that are added to numbers
of full precision, so few bits of each are enough: codes of 8 or 4 bits between the least and the
largest of a row.

Source: Modoranu et al., arXiv 2505.17967, section 4 and appendix, with the authors' quantizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from modicum.optim.kept import KeptTensor
from modicum.optim.projectors import MatrixShape

CarriedBits = Literal[4, 8, 16, 32]


@dataclass(frozen=True)
class CarriedOver:
    """B <- B + G before the projector, and B <- B - (1 - keep) up(down(B)) after it.

    Args:
        name: of B in an optimizer's state; codes have `NAME_least` and `NAME_unit` next to them.
        keep: 0 is error feedback: what is inside of the subspace is used up. Else it is the decay
            of a momentum, whose part outside of the subspace does not decay.
        bits: of an element of B: 32, 16 (bf16), or codes of 8 or 4.

    >>> carried, state = CarriedOver("error", bits=4), {}
    >>> carried.close(state, torch.tensor([[0.0, 1.0, 15.0], [2.0, 2.0, 2.0]]))
    >>> state["error"].dtype, tuple(state["error"].shape), carried.open(state, (2, 3)).tolist()
    (torch.uint8, (2, 2), [[0.0, 1.0, 15.0], [2.0, 2.0, 2.0]])
    """

    name: str = "error"
    keep: float = 0.0
    bits: CarriedBits = 32

    def state(self, shape: MatrixShape) -> dict[str, KeptTensor]:
        """What is kept for a matrix of this shape, by names."""
        rows, columns = shape
        if self.bits > 8:
            return {self.name: KeptTensor(shape, bits=self.bits)}
        codes = KeptTensor((rows, -(-columns * self.bits // 8)), torch.uint8)
        of_rows = KeptTensor((rows,))
        return {self.name: codes, f"{self.name}_least": of_rows, f"{self.name}_unit": of_rows}

    def nbytes(self, shape: MatrixShape) -> int:
        """Bytes that are kept for a matrix of this shape."""
        return sum(kept.nbytes(32) for kept in self.state(shape).values())

    def copied(self, shape: MatrixShape) -> int:
        """Bytes of B in fp32 in addition to what is kept, and of what makes codes of it."""
        size = 4 * shape[0] * shape[1]
        return {32: 0, 16: size}.get(self.bits, 3 * size)

    def open(self, state: dict[str, Any], shape: MatrixShape, like: Tensor | None = None) -> Tensor:
        """B in fp32, zeros where it is new; with 32 bits it is what `state` has."""
        kept = state.get(self.name)
        if kept is None:
            found = torch.zeros(shape, device=None if like is None else like.device)
            if self.bits == 32:
                state[self.name] = found
            return found
        if self.bits > 8:
            opened: Tensor = kept.float()
            return opened
        if self.bits == 4:
            kept = torch.stack([kept & 15, kept >> 4], 2).view(shape[0], -1)[:, : shape[1]]
        least, unit = state[f"{self.name}_least"], state[f"{self.name}_unit"]
        return kept.float().mul_(unit[:, None]).add_(least[:, None])

    def close(self, state: dict[str, Any], values: Tensor) -> None:
        """Keep B [m, n], which is given up."""
        if self.bits > 8:
            _keep(state, self.name, values if self.bits == 32 else values.bfloat16())
            return
        least, most = values.aminmax(dim=1)
        unit = most.sub_(least).div_(2**self.bits - 1)
        # In a row of equal numbers every code says the same.
        steps = torch.where(unit > 0, unit, 1.0)
        codes = values.sub_(least[:, None]).div_(steps[:, None]).round_().to(torch.uint8)
        if self.bits == 4:
            codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        for name, kept in ((self.name, codes), (f"{self.name}_least", least)):
            _keep(state, name, kept)
        _keep(state, f"{self.name}_unit", unit)


def _keep(state: dict[str, Any], name: str, values: Tensor) -> None:
    """Where there is a tensor of this dtype it stays, with other values."""
    kept = state.get(name)
    if kept is None or kept.dtype != values.dtype:
        state[name] = values
    elif kept is not values:
        kept.copy_(values)
