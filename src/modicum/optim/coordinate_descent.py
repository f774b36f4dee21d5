"""Coordinate descent over grids, as a value of what was tried: it asks, and is given losses.

From the best point so far every change of one coordinate is tried, over its full grid, until no
change is better. Where the best value is at an end of its grid, the grid is extended.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from modicum.core.errors import InputError
from modicum.optim.search_grid import SearchGrid

GridPoint = Mapping[str, Any]
"""A value for each coordinate."""


class CoordinateDescent:
    """The search for the point of least loss; a loss that is no finite number is the worst.

    What is asked for depends on the losses before the current wave alone, so the order within a
    wave, and which of them were known from an earlier search, change nothing. No point comes twice.

    Args:
        space: the grid of each coordinate; defaults are where it begins.
        tolerance: losses so near to the least one are as good: the search ends where one of these
            points has all its neighbours tried. It may be set again as the search runs.
        most: points in all; None: as many as it takes.
        extensions: values by which a grid is extended at each end.

    Raises:
        InputError: `most` or `extensions` is too small.

    Source: Wen et al., "Fantastic Pretraining Optimizers and Where to Find Them", arXiv 2509.02046,
    phase I.

    >>> grid = SearchGrid((0.0, 1.0, 2.0), 0.0, "linear")
    >>> search = CoordinateDescent({"x": grid, "y": grid})
    >>> while wave := search.ask():
    ...     for point in wave:
    ...         search.tell(point, (point["x"] - 1) ** 2 + (point["y"] - 3) ** 2)
    >>> search.best, search.complete, search.grids["y"].values
    ({'x': 1.0, 'y': 3.0}, True, (0.0, 1.0, 2.0, 3.0, 4.0))
    """

    def __init__(
        self,
        space: Mapping[str, SearchGrid],
        *,
        tolerance: float = 0.0,
        most: int | None = None,
        extensions: int = 4,
    ) -> None:
        for name, value, least in (("most", most, 1), ("extensions", extensions, 0)):
            if value is not None and value < least:
                problem = "too few"
                raise InputError(problem, field=name, value=value, allowed=f"{least} or more")
        self.tolerance, self.most, self.extensions = tolerance, most, extensions
        self.grids = dict(space)
        self.start = {name: grid.default for name, grid in space.items()}
        self._known: dict[str, tuple[dict[str, Any], float]] = {}
        self._waiting: dict[str, dict[str, Any]] = {}
        self._extended: dict[tuple[str, bool], int] = {}

    def ask(self) -> list[dict[str, Any]]:
        """The points whose losses are wanted now, in any order; none: the search has ended."""
        left = math.inf if self.most is None else self.most - len(self._known)
        if not self._waiting and left > 0:
            wave = self._wave()
            while not wave and not self.complete and self._extend():
                wave = self._wave()
            wave = wave[: int(min(left, len(wave)))]
            self._waiting = {key_of(point): point for point in wave}
        return [dict(point) for point in self._waiting.values()]

    def tell(self, point: GridPoint, loss: float) -> None:
        """The loss at a point that was asked for.

        Raises:
            InputError: it was not asked for, or is known.
        """
        key = key_of(point)
        if key not in self._waiting:
            problem = "is known already" if key in self._known else "was not asked for"
            raise InputError(problem, field="point", value=dict(point))
        loss = float(loss) if math.isfinite(loss) else math.inf
        self._known[key] = (self._waiting.pop(key), loss)

    @property
    def tried(self) -> list[tuple[dict[str, Any], float]]:
        """Each point with its loss; +inf where training diverged."""
        return [(dict(point), loss) for point, loss in self._known.values()]

    @property
    def best(self) -> dict[str, Any] | None:
        """The point of least loss; None where none is finite."""
        key = self._best
        return None if key is None else dict(self._known[key][0])

    @property
    def best_loss(self) -> float:
        """The least loss; +inf where none is finite."""
        key = self._best
        return math.inf if key is None else self._known[key][1]

    def near(self, tolerance: float | None = None) -> list[dict[str, Any]]:
        """The points whose loss is above the least one by no more than the tolerance."""
        bar = self.best_loss + (self.tolerance if tolerance is None else tolerance)
        found = [(loss, key) for key, (_, loss) in self._known.items() if math.isfinite(loss)]
        return [dict(self._known[key][0]) for loss, key in sorted(found) if loss <= bar]

    @property
    def complete(self) -> bool:
        """Whether some point within the tolerance has all its neighbours tried, and is no edge."""
        return any(
            not self._edges(point)
            and all(key_of(other) in self._known for other in self.neighbours(point))
            for point in self.near()
        )

    @property
    def edges(self) -> dict[str, Any]:
        """Where the best point lies at an end of a grid of numbers: the coordinate, its value."""
        best = self.best
        if best is None:
            return {}
        return {
            name: best[name]
            for name, grid in self.grids.items()
            if grid.extended(best[name]) is not None
        }

    def neighbours(self, point: GridPoint) -> Iterator[dict[str, Any]]:
        """Every change of one coordinate, over its grid."""
        for name, grid in self.grids.items():
            for value in grid.values:
                if value != point[name]:
                    yield {**point, name: value}

    @property
    def _best(self) -> str | None:
        """Of equal losses the start, or the first by its key, whichever order they came in."""
        start = key_of(self.start)
        found = [
            (loss, key != start, key)
            for key, (_, loss) in self._known.items()
            if math.isfinite(loss)
        ]
        return min(found)[2] if found else None

    def _wave(self) -> list[dict[str, Any]]:
        centre = self.best or self.start
        wave = [centre, *self.neighbours(centre)]
        if self._known and self.complete:
            return []
        return [dict(point) for point in wave if key_of(point) not in self._known]

    def _edges(self, point: GridPoint) -> Sequence[tuple[str, bool]]:
        """Coordinates, and whether it is the upper end, at which the grid may be extended."""
        found = []
        for name, grid in self.grids.items():
            end = (name, point[name] == grid.values[-1])
            left = self._extended.get(end, 0) < self.extensions
            if left and grid.extended(point[name]) is not None:
                found.append(end)
        return found

    def _extend(self) -> bool:
        """Extend the grids at whose end the best point lies; whether there was one."""
        best = self.best
        ends = [] if best is None else self._edges(best)
        for end in ends:
            assert best is not None
            grid = self.grids[end[0]].extended(best[end[0]])
            assert grid is not None
            self.grids[end[0]] = grid
            self._extended[end] = self._extended.get(end, 0) + 1
        return bool(ends)


def key_of(point: GridPoint) -> str:
    """A text for a point, the same for the same values in any order."""
    return json.dumps(point, sort_keys=True)
