"""When a loss falls too slowly for what is spent on it: two running averages, looked at now and
then."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class LossDecrease:
    """Follows how fast a loss falls, relative to itself, and says when that is little.

    A fast and a slow running average of the loss begin at its first value; the rate of an update is
    (slow - fast) / |slow|, and a window's is the mean of its updates'. Once a window is over, its
    rate is compared with the best of all windows so far. A loss that is no number is passed over.

    Args:
        window: updates; the fast average is one over about so many, the slow one over four times as
            many.
        share: of the best rate.

    Source: our reconstruction of "loss-decrease-rate based", which is all that is published.

    >>> decrease = LossDecrease(window=2, share=0.5)
    >>> [decrease.is_little(loss) for loss in (8.0, 4.0, 2.0, *[1.0] * 12)].index(True)
    13
    """

    window: int
    share: float
    fast: float | None = None
    slow: float = 0.0
    total: float = 0.0
    seen: int = 0
    best: float = 0.0

    def is_little(self, loss: float) -> bool:
        """Take the loss of an update up; whether a window is over whose rate is little."""
        if not math.isfinite(loss):
            return False
        if self.fast is None:
            self.fast = self.slow = loss
        self.fast += 2 / (self.window + 1) * (loss - self.fast)
        self.slow += 2 / (4 * self.window + 1) * (loss - self.slow)
        self.total += (self.slow - self.fast) / max(abs(self.slow), 1e-30)
        self.seen += 1
        if self.seen < self.window:
            return False
        rate, self.total, self.seen = self.total / self.window, 0.0, 0
        self.best = max(self.best, rate)
        return self.best > 0 and rate < self.share * self.best

    def state(self) -> dict[str, Any]:
        """What the next answer depends on."""
        own = asdict(self)
        return {name: own[name] for name in ("fast", "slow", "total", "seen", "best")}

    def restore(self, state: dict[str, Any]) -> None:
        """Put a state back."""
        for name in self.state():
            setattr(self, name, state[name])
