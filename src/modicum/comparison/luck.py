"""How much of a side's loss is luck of its tuning: other noise would have frozen other settings.

Seeds alone do not show it: every one of them is trained at the settings that were frozen once. Two
sides that are the same would so be called different, the more often the more seeds there are.
"""

from __future__ import annotations

from dataclasses import dataclass

from modicum.core.extras import library

_RESAMPLES = 200


@dataclass(frozen=True)
class Selection:
    """What the frozen settings were chosen from.

    Args:
        losses: of all settings that ended well, the mean where they were repeated.
        leaders: how many of the best were repeated, `repetitions` times.
    """

    losses: tuple[float, ...]
    leaders: int = 0
    repetitions: int = 0

    def variance(self, deviation: float, seed: int = 0) -> float:
        """Of the chosen settings' loss, if they were chosen again with other noise.

        A parametric bootstrap of the choice: losses are redrawn around those that were seen, the
        leaders repeated, and the one of the least mean is taken.

        Args:
            deviation: of one training's loss at given settings.

        >>> Selection((2.0, 3.0)).variance(deviation=0.0)
        0.0
        >>> round(Selection((2.0, 2.1)).variance(deviation=1.0), 4)          # either, then
        0.0025
        """
        count = len(self.losses)
        if count < 2 or deviation == 0:
            return 0.0
        numpy = library("numpy", "tuning", "the luck of tuning")
        generator = numpy.random.default_rng(seed)
        true = numpy.asarray(self.losses)
        drawn = true + deviation * generator.standard_normal((_RESAMPLES, count))
        leaders = min(self.leaders if self.repetitions else 1, count)
        best = numpy.argsort(drawn, axis=1)[:, :leaders]
        means = numpy.take_along_axis(drawn, best, axis=1)
        if self.repetitions:
            noise = generator.standard_normal(best.shape) * deviation / self.repetitions**0.5
            repeated = self.repetitions * (true[best] + noise)
            means = (means + repeated) / (self.repetitions + 1)
        chosen = numpy.take_along_axis(best, means.argmin(axis=1)[:, None], axis=1)
        return float(true[chosen].var())
