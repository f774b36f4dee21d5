"""The size of buckets, searched while training continues.

Many small calls cost a start each; one large call cannot overlap with anything. Where the best size
lies between them depends on the link and on the model.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MEGABYTE = 1_000_000


class Tuner:
    """Looks for the bucket size at which an iteration is shortest, by Bayesian optimization.

    Five iterations are a window; the mean of its last three is one observation, and the first
    window is thrown away. A Gaussian process over the logarithm of the size (Matern 5/2) says which
    size to try next: the one of the largest expected improvement. After ten trials the best one
    stays.

    Args:
        total: bytes of all gradients. Sizes are looked for between 1 and 256 MB, but not above the
            total, and from a hundredth of it where that is less.

    Source: DeAR, section IV-C, and the authors' `tuner.py`, which has its bounds linear, its margin
    xi = 0.1 in seconds, and the process from a library. Here xi is in standard deviations.

    >>> tuner = Tuner(total=100_000_000)
    >>> while not tuner.done:
    ...     _ = tuner.record(seconds=1 + abs(math.log(tuner.bucket_bytes / 8_000_000)))
    >>> 6 < tuner.bucket_bytes / MEGABYTE < 11
    True
    """

    TRIALS, WINDOW, SKIPPED, MARGIN = 10, 5, 2, 0.1

    def __init__(self, total: int, start: float = 25 * MEGABYTE) -> None:
        self._low = math.log(max(1.0, min(MEGABYTE, total / 100)))
        self._high = max(self._low, math.log(max(1, min(256 * MEGABYTE, total))))
        self.bucket_bytes = math.exp(min(max(math.log(start), self._low), self._high))
        self._tried: list[float] = []
        self._seconds: list[float] = []
        self._window: list[float] = []
        self._warm = self.done = False

    def record(self, seconds: float) -> bool:
        """Note an iteration's time; whether `bucket_bytes` may have changed by it."""
        if self.done:
            return False
        self._window.append(seconds)
        if len(self._window) < self.WINDOW:
            return False
        kept, self._window = self._window[self.SKIPPED :], []
        if not self._warm:
            self._warm = True
            return False
        self._tried.append(math.log(self.bucket_bytes))
        self._seconds.append(sum(kept) / len(kept))
        self.done = len(self._tried) == self.TRIALS
        best = self._tried[self._seconds.index(min(self._seconds))]
        self.bucket_bytes = math.exp(best if self.done else self._next())
        return True

    def _next(self) -> float:
        """The logarithm of the size of the largest expected improvement."""
        y = -torch.tensor(self._seconds, dtype=torch.float64)
        y = (y - y.mean()) / y.std(correction=0).clamp_min(1e-9)
        candidates = torch.linspace(self._low, self._high, 257, dtype=torch.float64)
        mean, deviation = self._posterior(torch.tensor(self._tried, dtype=y.dtype), y, candidates)
        gain = mean - y.max() - self.MARGIN
        z = gain / deviation
        density = torch.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
        return float(candidates[(gain * torch.special.ndtr(z) + deviation * density).argmax()])

    def _posterior(self, x: Tensor, y: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation at `at`, with the likeliest of a few length scales."""
        found = []
        for part in (0.1, 0.2, 0.4, 0.8):
            scale = part * max(self._high - self._low, 1e-9)
            noisy = _matern(x, x, scale) + 0.01 * torch.eye(len(x), dtype=x.dtype)
            root = torch.linalg.cholesky(noisy)
            weights = torch.cholesky_solve(y[:, None], root)[:, 0]
            likelihood = -0.5 * y @ weights - root.diagonal().log().sum()
            found.append((float(likelihood), scale, root, weights))
        _, scale, root, weights = max(found, key=lambda entry: entry[0])
        across = _matern(at, x, scale)
        explained = (across * torch.cholesky_solve(across.T, root).T).sum(1)
        return across @ weights, (1 - explained).clamp_min(1e-12).sqrt()


def _matern(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """The Matern kernel of order 5/2 between points [n] and [m]."""
    distance = math.sqrt(5) * (x[:, None] - y[None, :]).abs() / scale
    return (1 + distance + distance**2 / 3) * torch.exp(-distance)
