"""PowerSGD: one step of power iteration a gradient and update, two thin factors on the wire."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from modicum.comm.low_rank import LowRankMethod
from modicum.comm.low_rank_exchange import LowRankExchange, orthogonal
from modicum.core.contracts.method import Info
from modicum.core.ranks.exchange import ExchangeContext
from modicum.core.ranks.matrix_exchange import BEHIND, GradientSum, ProductSum


class PowerSGDExchange(LowRankExchange):
    """P = orth(sum of M Q), then Q = sum of M^T P: two calls, of which the second waits."""

    sums_twice = True

    def __init__(self, method: PowerSGD, context: ExchangeContext) -> None:
        super().__init__(method, context)
        self._bases: dict[str, Tensor] = {}

    def send(self, name: str, matrix: Tensor) -> Tensor:
        return matrix @ self.factors(name, matrix)[1]

    @torch.no_grad()
    def encode_again(self, name: str, total: Tensor) -> Tensor | None:
        matrix = self.compressed(name)
        if matrix is None:
            return None
        self._bases[name] = orthogonal(total)
        return matrix.T @ self._bases[name]

    def rebuild(self, name: str, total: Tensor, second: Tensor | None) -> GradientSum:
        matrix, basis = self.compressed(name), self._bases.pop(name)
        assert matrix is not None
        assert second is not None
        error = matrix.addmm_(basis, second.T, alpha=-1 / self.peers)
        self.stage(name, error, (basis, second))
        return ProductSum(basis, second, self.shape(name))

    def discard(self) -> None:
        super().discard()
        self._bases.clear()


class PowerSGD(LowRankMethod):
    """Gradient matrices as P Q^T of rank r, found by one step of power iteration an update.

    Each rank sends M Q, all orthogonalize the sum P, and send M^T P; Q of one update begins the
    next one. What P Q^T leaves of a rank's gradient is added to its next one. A matrix n by m takes
    r (n + m) numbers in place of n m, in two calls that wait for one another: the second of a
    bucket begins when two more have begun, those of the last two after the backward pass. Prefer
    ACP-SGD, which sends half;
    this is the baseline.

    Next to PyTorch's hook, any number of buckets is right on gloo, whose calls are here issued in
    one order; sums are not means; Q is not orthogonalized, as in the paper, which spans the same.

    Args:
        rank, start_after, least_saving, error_feedback: see `LowRankMethod`.

    Source: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization", NeurIPS 2019, arXiv 1905.13727, algorithms 1 and 2.

    Started by `torchrun`, by `joined` (or alone, as here, where nothing is compressed).
    `wrap` sends buckets while the backward pass runs; this sends all gradients after it:

    >>> from modicum.core.ranks.ranks import Ranks
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 1))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> exchange = PowerSGD(rank=2).bind(ExchangeContext(Ranks()))
    >>> for _ in range(10):
    ...     loss = model(torch.ones(4, 16)).square().sum() / 4  # over the samples of all ranks
    ...     loss.backward()
    ...     exchange.reduce(model)
    ...     optimizer.step()
    ...     exchange.commit()
    ...     model.zero_grad()
    """

    info = Info(
        name="powersgd",
        title="PowerSGD: gradients as products of thin matrices, found by power iteration",
        room="comm",
        paper="PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization, "
        "arXiv 1905.13727",
        claim="the test accuracy of SGD at a small part of its bytes",
        traits=("crosses_wire", "owes_gradients", "exact_resume", "compiles"),
        evidence="verified against code",
        tiny={"rank": 2},
    )
    halves: ClassVar[int] = 2

    def late_part(self, calls: int) -> float:
        return min(0.5, BEHIND / calls)

    def bind(self, context: ExchangeContext) -> PowerSGDExchange:
        """The exchange among these ranks; all of them call this."""
        return PowerSGDExchange(self, context)
