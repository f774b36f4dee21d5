"""How often a run is saved where failures are expected: often enough, and no more often.

Source: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9),
1974: the square root of 2 C M, with C the seconds that a save keeps training waiting and M those
between two failures; J. T. Daly, FGCS 22(3), 2006, shows how good that is while C is far below M.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from modicum.core.files import JsonObject
from modicum.core.units import format_duration
from modicum.recipe import Recipe

EVERY = "checkpoint.every"
FIRST = 5  # steps to the first save, whose cost is measured
_HOUR = 3600.0


@dataclass(frozen=True)
class SaveForecast:
    """What saves at an interval cost, and what failures lose.

    Args:
        interval: seconds between two saves.
        cost: seconds that a save keeps training waiting.
        between: seconds between two failures, on average.

    >>> SaveForecast.best(cost=2.0, between=36_000.0).interval
    379.4733192202055
    """

    interval: float
    cost: float
    between: float

    @classmethod
    def best(cls, cost: float, between: float, least: float = 1.0) -> SaveForecast:
        """The interval at which saves and lost work together take the least time.

        Args:
            least: never more often than this, in seconds; a save waits for the one before.
        """
        return cls(max(math.sqrt(2 * cost * between), least), cost, between)

    @property
    def lost(self) -> float:
        """Seconds of work that a failure loses on average: half an interval."""
        return self.interval / 2

    @property
    def share(self) -> float:
        """The part of the run's time that goes into saves and into work done twice."""
        return self.cost / self.interval + self.lost / self.between

    def row(self) -> dict[str, Any]:
        """As `run.json` has it."""
        return {
            "every_seconds": self.interval,
            "cost_seconds": self.cost,
            "hours_between_failures": self.between / _HOUR,
            "lost_seconds": self.lost,
            "share": self.share,
        }

    def words(self) -> str:
        """Why, and what is to be expected."""
        return (
            f"a save keeps training waiting for {self.cost:.2g} s, and failures come every "
            f"{self.between / _HOUR:.4g} hours: sqrt(2 × {self.cost:.2g} s × "
            f"{self.between:.4g} s) (Young 1974); a failure loses {format_duration(self.lost)} on "
            f"average, saves and lost work together take {100 * self.share:.2g} % of the time"
        )


def first_choice(recipe: Recipe) -> JsonObject:
    """The choice of a plan that is made before any save was measured."""
    hours = recipe.checkpoint.hours_between_failures
    why = (
        f"a first save after {FIRST} steps is measured; from then on every sqrt(2 × what it costs "
        f"× {hours:g} hours between failures) (Young 1974)"
    )
    return {"field": EVERY, "value": FIRST, "why": why}
