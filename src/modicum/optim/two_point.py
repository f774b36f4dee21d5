"""Updates from losses alone: two points along random directions, and a log that replays them."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modicum.core.contracts.parameters import is_idle
from modicum.core.draws import DrawKind, add_
from modicum.core.errors import InputError
from modicum.core.ranks.sharding import elements_before, own_part

Totals = Callable[..., list[float]]
"""Sums of some numbers over the ranks, such as `Ranks.sum`."""


def own_numbers(*values: float) -> list[float]:
    """The sums of one rank alone."""
    return list(values)


@dataclass(frozen=True)
class TwoPointEstimate:
    """What the losses of an update say.

    Args:
        loss: the mean over all points.
        slopes: (l(W + e z) - l(W - e z)) / 2e of each direction z, the projected gradients.
    """

    loss: float
    slopes: tuple[float, ...]

    @property
    def norm(self) -> float:
        """An estimate of the gradient's norm: the root of the slopes' mean square."""
        return math.sqrt(sum(slope * slope for slope in self.slopes) / len(self.slopes))

    @property
    def finite(self) -> bool:
        """Whether an update can be made of it."""
        return math.isfinite(self.loss) and all(map(math.isfinite, self.slopes))


class TwoPoint:
    """MeZO's updates over K directions: W loses rate / K sum_k slope_k z_k, with z_k by the seed.

    z_k of a parameter is drawn by (seed, step, name, k) wherever it is needed and kept nowhere, and
    a rank that has some rows of it draws those. So a run is its first weights and its `log`, of
    K + 2 numbers an update: the step, the rate and the slopes. Weights move in place, by e, -2e and
    e, which leaves errors of rounding; with `snapshot` they are copied first and are what they were
    after the passes, to the bit.

    Args:
        parameters: by name, sharded or not. One that has several names, as tied weights do, counts
            once, under the first.
        seed: of the directions.
        epsilon: e, how far from the weights losses are taken.
        perturbations: K, directions an update.
        snapshot: hold a copy of the parameters during the passes.
        draw: of the directions: normal numbers, or signs.
        rates: multiplies the rate of some parameters.
        decays: weight decay of some parameters: rate decay W comes off W before the update.

    Raises:
        InputError: nothing is trained, or a number is out of range.

    Source: Malladi et al., arXiv 2305.17333, algorithms 1 and 2; ranks as in DistZO2, arXiv
    2507.03211.

    >>> weight = torch.tensor([1.0, 2.0])
    >>> training = TwoPoint({"weight": weight}, seed=0)
    >>> for step in range(1, 301):
    ...     _ = training.update(step, 0.05, lambda: float(weight.square().sum()))
    >>> bool(weight.abs().max() < 1e-3)
    True
    >>> again = torch.tensor([1.0, 2.0])
    >>> TwoPoint({"weight": again}, seed=0).replay(training.log)
    >>> torch.equal(again, weight)
    True
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        *,
        seed: int,
        epsilon: float = 1e-3,
        perturbations: int = 1,
        snapshot: bool = False,
        draw: DrawKind = "normal",
        rates: Mapping[str, float] | None = None,
        decays: Mapping[str, float] | None = None,
    ) -> None:
        named = dict(parameters)
        first = {id(parameter): name for name, parameter in reversed(named.items())}
        self.parameters = {n: p for n, p in named.items() if first[id(p)] == n}
        if not epsilon > 0:
            raise InputError("must be positive", field="epsilon", value=epsilon)
        if perturbations < 1:
            raise InputError("too few", field="perturbations", value=perturbations)
        self.seed, self.epsilon, self.perturbations = seed, epsilon, perturbations
        self.snapshot, self.draw = snapshot, draw
        self.rates, self.decays = rates or {}, decays or {}
        self.log: list[tuple[float, ...]] = []

    def update(
        self,
        step: int,
        rate: float,
        loss: Callable[[], float],
        *,
        share: tuple[int, int] = (0, 1),
        totals: Totals = own_numbers,
    ) -> TwoPointEstimate:
        """Estimate, update, and write the log; what is not finite makes no update.

        Args:
            step: counts from 1; the directions depend on it.
            loss: of the weights as they are when it is called, 2 K times.
            share: (i, n): this rank takes the losses of every n-th point, from the i-th on; the
                others are left to the ranks that have these.
            totals: sums over ranks. What `loss` gives on those that take the same points adds up.
        """
        estimate = self.estimate(step, loss, share=share, totals=totals)
        self.finish(step, rate, estimate)
        return estimate

    def finish(self, step: int, rate: float, estimate: TwoPointEstimate) -> None:
        """Update by an estimate, and write the log; what is not finite makes no update."""
        if estimate.finite:
            self.apply(step, rate, estimate.slopes)
            self.log.append((step, rate, *estimate.slopes))
        else:
            self.log.append((step, 0.0, *[0.0] * self.perturbations))

    @torch.no_grad()
    def estimate(
        self,
        step: int,
        loss: Callable[[], float],
        *,
        share: tuple[int, int] = (0, 1),
        totals: Totals = own_numbers,
    ) -> TwoPointEstimate:
        """The losses at W + e z and W - e z, of each z; weights are back in place at the end."""
        index, count = share
        losses = []
        with closing(self._visits(step)) as visits:
            for number, _ in enumerate(visits):
                losses.append(float(loss()) if number % count == index else 0.0)
        # One sum, whose bits are the same on all ranks: else their weights would drift apart.
        losses = totals(*losses)
        pairs = zip(losses[::2], losses[1::2], strict=True)
        slopes = tuple((up - down) / (2 * self.epsilon) for up, down in pairs)
        return TwoPointEstimate(sum(losses) / len(losses), slopes)

    @torch.no_grad()
    def apply(self, step: int, rate: float, slopes: Sequence[float]) -> None:
        """Update the weights by the slopes of a step."""
        for name, part, offset in self._parts():
            self._advance(part, name, offset, step, rate, slopes)

    @torch.no_grad()
    def replay(self, log: Iterable[Sequence[float]]) -> None:
        """Make the updates of a log again, without any loss: the same weights, to the bit."""
        for step, rate, *slopes in log:
            if not self.snapshot:
                self.estimate(int(step), lambda: 0.0)  # for what moving to and fro leaves
            self.apply(int(step), rate, slopes)
            self.log.append((step, rate, *slopes))

    def flush(self) -> None:
        """Finish what was deferred: from here on weights may be read. Here nothing is."""

    def _visits(self, step: int) -> Generator[tuple[int, float]]:
        """Go to each point in turn, (number of the direction, distance), and back at the end."""
        parts = list(self._parts())
        kept = [part.clone() for _, part, _ in parts] if self.snapshot else []
        for k in range(self.perturbations):
            at = 0.0
            try:
                for point in (self.epsilon, -self.epsilon):
                    if kept and at:
                        _copy(parts, kept)
                        at = 0.0
                    self._move(parts, step, k, point - at)
                    at = point
                    yield k, point
            finally:
                if kept:
                    _copy(parts, kept)
                else:
                    self._move(parts, step, k, -at)

    def _move(
        self, parts: Iterable[tuple[str, Tensor, int]], step: int, k: int, distance: float
    ) -> None:
        for name, part, offset in parts:
            self._perturb(part, name, offset, step, k, distance)

    def _perturb(
        self, part: Tensor, name: str, offset: int, step: int, k: int, distance: float
    ) -> None:
        stream = f"{name}/{k}"
        add_(part, distance, seed=self.seed, name=stream, step=step, offset=offset, kind=self.draw)

    def _advance(
        self,
        part: Tensor,
        name: str,
        offset: int,
        step: int,
        rate: float,
        slopes: Sequence[float],
    ) -> None:
        """The update of one parameter, or of some of its rows."""
        rate = rate * self.rates.get(name, 1.0)
        if not rate:
            return
        if decay := self.decays.get(name, 0.0):
            part.mul_(1 - rate * decay)
        for k, slope in enumerate(slopes):
            self._perturb(part, name, offset, step, k, -rate * slope / len(slopes))

    def _parts(self) -> Iterable[tuple[str, Tensor, int]]:
        """Name, this rank's part, and how many elements come before it, of each parameter."""
        for name, parameter in self.parameters.items():
            if not (isinstance(parameter, nn.Parameter) and is_idle(parameter)):
                yield name, own_part(parameter.detach())[0], elements_before(parameter)


def _copy(parts: Sequence[tuple[str, Tensor, int]], kept: Sequence[Tensor]) -> None:
    for (_, part, _), copy in zip(parts, kept, strict=True):
        part.copy_(copy)
