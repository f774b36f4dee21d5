"""Replicas whose gradients an exchange of the room `comm` sums as full matrices, in buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from modicum.core.ranks.bucketed import Bucket, Bucketed
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.matrix_exchange import GradientSum, MatrixExchange, gradient_or_zeros
from modicum.core.ranks.pending_sums import PendingSums
from modicum.core.ranks.ranks import Ranks


class GradientSender:
    """Gradients of some parameters, on their way through an exchange.

    Args:
        names: of the parameters, in the model.
    """

    def __init__(self, names: Sequence[str], exchange: MatrixExchange) -> None:
        self._names, self._exchange = list(names), exchange
        self._pending: PendingSums | None = None

    def send(self, parameters: Sequence[nn.Parameter], filled: set[int]) -> None:
        """Begin to sum; from here on no parameter has a gradient of this rank's.

        Args:
            filled: places of the parameters of which this rank has a gradient.
        """
        gradients = {
            name: gradient_or_zeros(parameter)
            for name, parameter in zip(self._names, parameters, strict=True)
        }
        used = {self._names[index] for index in filled}
        self._pending = self._exchange.begin(gradients, used)
        for parameter in parameters:
            parameter.grad = None

    def land(self) -> list[GradientSum | None]:
        """Wait for the sums; None: no rank has such a gradient."""
        assert self._pending is not None
        sums = self._pending.land()
        return [sums[name] for name in self._names]

    def clear(self) -> None:
        """Forget the update."""
        self._pending = None


class MatrixBucket(Bucket):
    """Parameters whose gradients an exchange sums; each has its sum when the bucket has landed.

    Args:
        named: the parameters by the model's names.
        divisor: of the sums.
    """

    def __init__(
        self, named: Mapping[str, nn.Parameter], exchange: MatrixExchange, divisor: int = 1
    ) -> None:
        super().__init__(list(named.values()))
        self._sender, self._divisor = GradientSender(list(named), exchange), divisor

    def _put(self, index: int) -> None:
        """It stays where it is until the bucket is sent."""

    def launch(self) -> None:
        """Begin to sum over the ranks; from here on no parameter has a gradient of this rank's."""
        self._sender.send(self.parameters, self._filled)

    def land(self) -> None:
        """Wait for the sums: every parameter that any rank used has its gradient."""
        for parameter, total in zip(self.parameters, self._sender.land(), strict=True):
            if total is None:
                parameter.grad = None
                continue
            full = total.full()
            if self._divisor > 1:
                full = full / self._divisor
            parameter.grad = full.to(parameter.dtype)
        self.clear()

    def clear(self) -> None:
        """Forget the update."""
        super().clear()
        self._sender.clear()


class MatrixReplicas(Bucketed[MatrixBucket]):
    """Every rank holds the full model; an exchange sums gradients while the backward pass runs.

    Args:
        matrices: sums the gradients of a bucket.
        mean: divide the sums by the number of ranks.
        bucket_bytes: a bucket is closed when it holds at least so much.
    """

    matrices: MatrixExchange

    def __init__(
        self,
        ranks: Ranks,
        matrices: MatrixExchange,
        *,
        mean: bool = False,
        bucket_bytes: int = 25_000_000,
    ) -> None:
        super().__init__(ranks, Layout.of(ranks.size), bucket_bytes, matrices)
        self._divisor, matrices.means = ranks.size if mean else 1, mean

    def meet(self, model: nn.Module, **terms: int | bool | None) -> None:
        """The same, where ranks agree on sums or means.

        Raises:
            InputError: another rank has other terms, or its model other trained parameters.
        """
        super().meet(model, mean=self._divisor > 1, **terms)

    def _bucket(self, parameters: Sequence[nn.Parameter], names: Sequence[str]) -> MatrixBucket:
        named = dict(zip(names, parameters, strict=True))
        return MatrixBucket(named, self.matrices, self._divisor)
