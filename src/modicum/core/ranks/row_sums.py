"""Sums of rows in the order of the rows: at once, or stretch by stretch next to other work."""

from __future__ import annotations

import torch
from torch import Tensor

# Elements of a stretch: a millisecond or less, after which who waits for the sum may take over.
STRETCH = 1 << 18
# Bytes of rows from which on their sum is worth another thread.
WORTH_A_THREAD = 1 << 20


def sum_in_order(rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The sum [n] of rows [W, n], first to last, in fp32 at least, rounded to a dtype once.

    Args:
        dtype: of the sum; by default that of the rows.

    >>> sum_in_order(torch.tensor([[1.0], [2**-24], [2**-24]])).item() == 1.0
    True
    """
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = rows[0].to(wide, copy=True)
    for row in rows[1:]:
        total += row
    return total.to(rows.dtype if dtype is None else dtype)


class RowSum:
    """`sum_in_order` of rows that are fp32 or fp64, of which any part may be made ahead.

    Parts are made by NumPy, which takes the thread that calls it and no other, has the
    interpreter's lock for microseconds, and knows nothing of modes that hold for a thread.

    Args:
        rows: [W, n], on the CPU.

    >>> total = RowSum(torch.arange(6.0).view(2, 3))
    >>> total.stretch(2), total().tolist()
    (False, [3.0, 5.0, 7.0])
    """

    def __init__(self, rows: Tensor) -> None:
        self._rows, self._made = rows.detach(), 0
        self._total: Tensor | None = None

    @staticmethod
    def suits(rows: Tensor) -> bool:
        """Whether another thread should make the sum, and can."""
        exact = rows.dtype in (torch.float32, torch.float64)
        return exact and rows.device.type == "cpu" and rows.nbytes >= WORTH_A_THREAD

    def stretch(self, elements: int = STRETCH) -> bool:
        """Make some more elements; whether all are there."""
        import numpy

        if self._total is None:
            self._total = torch.empty_like(self._rows[0])
        begin, end = self._made, min(self._made + elements, self._rows.shape[1])
        into, rows = self._total.numpy()[begin:end], self._rows.numpy()[:, begin:end]
        with numpy.errstate(over="ignore", invalid="ignore"):
            numpy.copyto(into, rows[0])
            for row in rows[1:]:
                numpy.add(into, row, out=into)
        self._made = end
        return end == self._rows.shape[1]

    def __call__(self) -> Tensor:
        """The sum, of which what is left is made now."""
        if self._total is None:
            return sum_in_order(self._rows)
        if self._made < self._rows.shape[1]:
            self._total[self._made :] = sum_in_order(self._rows[:, self._made :])
        return self._total
