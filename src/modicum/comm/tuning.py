"""The size of buckets, searched while training continues.

Many small calls cost a start each; one large call cannot overlap with anything. Where the best size
lies between them depends on the link and on the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from modicum.core.extras import library

MEGABYTE = 1_000_000
_SIZE = "bucket_bytes"


class Tuner:
    """Looks for the bucket size at which an iteration is shortest, by Bayesian optimization.

    Five iterations are a window; the mean of its last three is one observation, and the first
    window is thrown away. Optuna's Gaussian process over the logarithm of the size (Matern 5/2)
    says which size to try next: the one of the largest expected improvement. It is a function of
    the trials so far and of nothing else. After ten trials the best one stays.

    Args:
        total: bytes of all gradients. Sizes are looked for between 1 and 256 MB, but not above the
            total, and from a hundredth of it where that is less.

    Raises:
        InputError: Optuna or SciPy, which the extra `tuning` brings, is not installed.

    Source: DeAR, section IV-C, and the authors' `tuner.py`, which has its bounds linear, and a
    margin of 0.1 s by which a size must be better to count.

    >>> import math
    >>> tuner = Tuner(total=100_000_000)
    >>> while not tuner.done:
    ...     _ = tuner.record(seconds=1 + abs(math.log(tuner.bucket_bytes / 8_000_000)))
    >>> 6 < tuner.bucket_bytes / MEGABYTE < 11
    True
    """

    TRIALS, WINDOW, SKIPPED = 10, 5, 2

    def __init__(self, total: int, start: float = 25 * MEGABYTE) -> None:
        self._optuna = library("optuna", "tuning", "looking for the size of buckets")
        library("scipy", "tuning", "looking for the size of buckets")
        low = max(1.0, min(MEGABYTE, total / 100))
        high = max(low, min(256 * MEGABYTE, total))
        self._sizes = self._optuna.distributions.FloatDistribution(low, high, log=True)
        self.bucket_bytes = min(max(start, low), high)
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
        self._tried.append(self.bucket_bytes)
        self._seconds.append(sum(kept) / len(kept))
        self.done = len(self._tried) == self.TRIALS
        best = self._tried[self._seconds.index(min(self._seconds))]
        self.bucket_bytes = best if self.done else self._next()
        return True

    def _next(self) -> float:
        """The size of the largest expected improvement."""
        optuna = self._optuna
        sampler = optuna.samplers.GPSampler(seed=len(self._tried), n_startup_trials=1)
        with self._silent():
            study = optuna.create_study(sampler=sampler)
            for size, seconds in zip(self._tried, self._seconds, strict=True):
                trial = optuna.trial.create_trial(
                    params={_SIZE: size}, distributions={_SIZE: self._sizes}, value=seconds
                )
                study.add_trial(trial)
            return float(study.ask({_SIZE: self._sizes}).params[_SIZE])

    @contextmanager
    def _silent(self) -> Iterator[None]:
        """Optuna tells of every study, and of the libraries that would make it faster."""
        logging = self._optuna.logging
        before = logging.get_verbosity()
        logging.set_verbosity(logging.ERROR)
        try:
            yield
        finally:
            logging.set_verbosity(before)
