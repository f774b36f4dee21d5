"""ACP-SGD: the two factors of PowerSGD take turns, so a bucket is one call and half the bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from modicum.comm.debts import TURNED
from modicum.comm.low_rank import LowRankMethod
from modicum.comm.low_rank_exchange import LowRankExchange, orthogonal
from modicum.core.contracts.method import Against, Info
from modicum.core.ranks.exchange import ExchangeContext
from modicum.core.ranks.matrix_exchange import GradientSum, ProductSum


class ACPSGDExchange(LowRankExchange):
    """In even updates P = sum of M orth(Q), in odd ones Q = sum of M^T orth(P).

    Updates count by matrix: one in which no rank has a gradient of it is none of its own.
    """

    def __init__(self, method: ACPSGD, context: ExchangeContext) -> None:
        super().__init__(method, context)
        self._turned: set[str] = set()  # names of those that had no part in an odd number

    def _sends_p(self, name: str) -> bool:
        return (self.step + (name in self._turned)) % 2 == 0

    def send(self, name: str, matrix: Tensor) -> Tensor:
        p, q = self.factors(name, matrix)
        sends_p = self._sends_p(name)
        if sends_p:
            basis = orthogonal(q)
            own = matrix @ basis
            # What this rank leaves is known before anything is sent: nothing waits for it.
            matrix.addmm_(own, basis.T, alpha=-1)
        else:
            basis = orthogonal(p)
            own = matrix.T @ basis
            matrix.addmm_(basis, own.T, alpha=-1)
        self.stage(name, matrix, (own, basis) if sends_p else (basis, own))
        return own

    def rebuild(self, name: str, total: Tensor, second: Tensor | None) -> GradientSum:
        error, (p, q) = self.staged(name)
        factor = total.clone()  # with a view of it the message would stay
        p, q = (factor, q) if self._sends_p(name) else (p, factor)
        self.stage(name, error, (p, q))
        return ProductSum(p, q, self.shape(name))

    def keep(self) -> None:
        if not self._dense_now:
            self._turned ^= self._factors.keys() - self._staged.keys()
        super().keep()

    # Where gradients are rows, each rank has other matrices.

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **({} if self.rows else self._turns())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if not self.rows:
            self._turned = set(state.get(TURNED, ()))

    def owed(self) -> dict[str, Any]:
        return {**super().owed(), **(self._turns() if self.rows else {})}

    def owe(self, state: Mapping[str, Any]) -> None:
        super().owe(state)
        if self.rows:
            self._turned = set(state.get(TURNED, ()))

    def _turns(self) -> dict[str, Any]:
        return {TURNED: sorted(self._turned)} if self._turned else {}


class ACPSGD(LowRankMethod):
    """Gradient matrices as P Q^T of rank r, of which P travels in one update and Q in the next.

    The factor that does not travel is the orthogonalized sum of the last update, alike on all
    ranks. So a matrix n by m takes r (n + m) / 2 numbers an update on average, in one call a
    bucket that leaves inside the backward pass; PowerSGD takes twice that in two calls, one after
    the other. What P Q^T leaves of a rank's gradient is added to its next one. Prefer it where an
    all-reduce of all gradients takes longer than computing them, for models of large matrices.
    Below half of that a dense exchange hides behind the backward pass, and nothing is saved.

    A bucket is closed by the bytes of its gradients, not of its factors: so it leaves after as many
    layers as a dense one, for which the authors scale their thresholds by the compression.
    Clip what was rebuilt, as the trainer does. Ranks orthogonalize alike where their processors and
    libraries are alike.

    Args:
        rank, start_after, least_saving, error_feedback: see `LowRankMethod`. The authors take rank
            4 for convolutional networks and 32 for BERT.

    Source: Zhang et al., "Evaluation and Optimization of Gradient Compression for Distributed Deep
    Learning", ICDCS 2023, arXiv 2306.08881; order of operations as in the authors' code.

    Started by `torchrun`, by `joined` (or alone, as here, where nothing is compressed).
    `wrap` sends buckets while the backward pass runs; this sends all gradients after it:

    >>> import torch
    >>> from modicum.core.ranks.ranks import Ranks
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 1))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> exchange = ACPSGD(rank=2).bind(ExchangeContext(Ranks()))
    >>> for _ in range(10):
    ...     loss = model(torch.ones(4, 16)).square().sum() / 4  # over the samples of all ranks
    ...     loss.backward()
    ...     exchange.reduce(model)
    ...     optimizer.step()
    ...     exchange.commit()
    ...     model.zero_grad()
    """

    info = Info(
        name="acp_sgd",
        title="ACP-SGD: PowerSGD's two factors take turns, one call a bucket",
        room="comm",
        paper="Evaluation and Optimization of Gradient Compression for Distributed Deep Learning, "
        "arXiv 2306.08881",
        claim="on average 4.06 times faster than S-SGD and 1.43 times faster than PowerSGD on 8 to "
        "64 GPUs, at similar accuracy",
        traits=("crosses_wire", "owes_gradients", "exact_resume", "compiles"),
        evidence="against paper",
        claim_verdict="in part",
        against=Against("equal", "PowerSGD of as many bytes"),
        reason="where communication takes 3 and 10 times what computing takes a step is 1.14 and "
        "1.44 times faster than PowerSGD's (bar 1.2), and takes 1.20 and 1.41 of its bound (bar "
        "1.25); held-out loss 0.9989 of PowerSGD's",
        tiny={"rank": 2},
    )
    halves: ClassVar[int] = 1

    def bind(self, context: ExchangeContext) -> ACPSGDExchange:
        """The exchange among these ranks; all of them call this."""
        return ACPSGDExchange(self, context)
