"""What to send as products of two thin matrices: which gradients, at which rank, what it costs.

A gradient of two dimensions or more is a matrix M [n, m], n its first dimension. How such products
are summed, and what becomes of what they leave, is in `low_rank_exchange`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field

from modicum.comm.base import MatrixMethod
from modicum.core.contracts.by_step import ByStep
from modicum.core.contracts.ledger import Entry, Ledger, Phase
from modicum.core.contracts.method import CountByStep, NonNegativeFloat, PositiveInt
from modicum.core.ranks.matrix_exchange import MatrixQuery, TensorShape


class LowRankMethod(MatrixMethod):
    """The value of a method that sends rank-r factors of gradient matrices.

    Every rank holds what it owes of full matrices, also where weights are sharded: 4 bytes a
    number. On FSDP2 gradients of micro-batches add up in full too, and each rank rebuilds its rows;
    with hybrid sharding the ranks of a host sum as FSDP2 does, and rows are compressed between
    hosts, so a rank owes of its rows alone. What is owed of a weight that an update does not use
    waits until it is used again; on FSDP2, which gives it a gradient of zeros, it is paid at once.

    Args:
        rank: r; of a matrix n by m the smallest of the three. Or (first, last, updates): r goes
            from one to the other in so many updates, and plans count the larger one.
        start_after: updates that are sent dense before the first one that is not.
        least_saving: a tensor travels as it is where its two factors together are not so many times
            smaller, also where they take turns; 0 sends factors of every matrix.
        error_feedback: whether what was left of a gradient is added to the next one.
    """

    halves: ClassVar[int]
    """How many of the two factors travel in an update."""

    rank: PositiveInt | CountByStep = 4
    start_after: Annotated[int, Field(ge=0)] = 0
    least_saving: NonNegativeFloat = 1.0
    error_feedback: bool = True

    @property
    def rank_by_step(self) -> ByStep:
        """The rank in each update; none in those that are sent dense before the first."""
        return ByStep.of(self.rank, self.start_after)

    def rank_of(self, shape: TensorShape) -> int:
        """The largest rank at which a gradient of this shape travels; 0: it travels as it is.

        At full rank the two factors are together larger than the matrix: so a LoRA's, of no larger
        rank than this, travel as they are.

        >>> from modicum.comm import ACPSGD
        >>> value = ACPSGD(rank=4)
        >>> [value.rank_of(shape) for shape in ((64, 32), (64, 2, 16), (64,), (8, 8), (2, 64))]
        [4, 4, 0, 0, 0]
        """
        if len(shape) < 2 or not math.prod(shape):
            return 0
        rows, columns = _sides(shape)
        rank = min(int(self.rank_by_step.most), rows, columns)
        both = rank * (rows + columns)
        return rank if both * self.least_saving < rows * columns else 0

    def dense(self, shapes: Mapping[str, TensorShape]) -> list[str]:
        """The names of gradients that travel as they are."""
        return [name for name, shape in shapes.items() if not self.rank_of(shape)]

    def coding_flops(self, shapes: Iterable[TensorShape]) -> int:
        """Products with the matrix (for each factor that travels, for the error, for the sum), and
        orthogonalizing a factor."""
        flops = 0
        for shape in shapes:
            if rank := self.rank_of(shape):
                flops += 2 * (self.halves + 2) * rank * math.prod(shape)
                flops += 4 * rank * rank * max(_sides(shape))
        return flops

    def ledger(self, at: MatrixQuery) -> Ledger:
        """Bytes that a rank sends in an update on average, its debts, and what makes new ones."""
        shapes, messages = at.shapes, []
        for bucket in at.buckets:
            thin = sum(self.rank_of(s) * sum(_sides(s)) for s in bucket if self.rank_of(s))
            plain = sum(math.prod(s) for s in bucket if not self.rank_of(s))
            messages.append((thin, plain + len(bucket)))
        # Of one factor an update, the two take turns.
        numbers = [thin * self.halves // 2 + plain for thin, plain in messages]
        calls = sum(1 + (self.halves == 2 and thin > 0) for thin, _ in messages)
        several = at.ranks > 1
        low = [math.prod(shape) for shape in shapes if self.rank_of(shape)]
        factors = sum(thin for thin, _ in messages)
        debt = 4 * sum(low) * several
        sums = 4 * sum(numbers) * several
        left: tuple[Phase, ...] = ("step",) if at.counted else ("backward", "step")
        return Ledger.of(
            Entry("buffer", debt * self.error_feedback, what="errors owed to the next update"),
            Entry("buffer", 4 * factors * several, what="factors of gradients"),
            Entry("gradient", debt, left, "errors of this update").in_tensors(4 * n for n in low),
            Entry("workspace", sums, ("backward", "step"), "sums on the wire").in_tensors(
                4 * each for each in numbers
            ),
            replace(at.wire(numbers), count=calls),
        )


def _sides(shape: TensorShape) -> tuple[int, int]:
    return shape[0], math.prod(shape[1:])
