"""What the fair benchmark must find where the answer is known: optima, edges, speed-ups."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from modicum.core.data_speedup import data_speedups
from modicum.core.scaling_fit import DataLaw
from modicum.optim.coordinate_descent import CoordinateDescent, GridPoint, key_of
from modicum.optim.search_grid import SearchGrid
from modicum.proofs.base import ProofRun

Space = Mapping[str, SearchGrid]
LossAt = Callable[[GridPoint], float]
DataLosses = dict[float, Sequence[float]]

RATIOS = (0.5, 1.0, 2.0, 4.0)
OPTIMUM = {"x": 3.0, "y": 2.0, "z": 4.0}


def the_known_optimum(run: ProofRun) -> None:
    """The optimum of a separable and of a coupled loss, on the grid."""
    run.progress("looking for known optima")
    search = run.contender(
        _descended, null=_one_by_one, null_is="each coordinate tuned once from the default"
    )
    values = tuple(float(value) for value in range(7))
    space = {name: SearchGrid(values, 0.0, "linear", 0.0, 6.0) for name in ("x", "y", "z")}
    for name, loss in (("separable", _separable), ("coupled", _coupled)):
        found, _ = search(space, loss)
        sentence = f"loss above the optimum's of a {name} loss"
        run.at_most(sentence, loss(found) - loss(OPTIMUM), 0.0, part="check")


def _separable(point: GridPoint) -> float:
    return sum((point[name] - best) ** 2 for name, best in OPTIMUM.items())


def _coupled(point: GridPoint) -> float:
    """The same with a valley that lies across: each coordinate alone is best elsewhere."""
    x, y, z = (point[name] - best for name, best in OPTIMUM.items())
    return float(x * x + y * y + z * z + 0.9 * x * y - 0.7 * y * z)


def _descended(
    space: Space, loss: LossAt, extensions: int = 4
) -> tuple[GridPoint, list[GridPoint]]:
    """The best point by coordinate descent, and all that it asked for."""
    search, asked = CoordinateDescent(space, extensions=extensions), list[GridPoint]()
    while wave := search.ask():
        asked += wave
        for point in wave:
            search.tell(point, loss(point))
    assert search.best is not None
    return search.best, asked


def _one_by_one(space: Space, loss: LossAt) -> tuple[GridPoint, list[GridPoint]]:
    """Each coordinate's best value with all others at their default."""
    start, found = {name: grid.default for name, grid in space.items()}, {}
    for name, grid in space.items():
        lines = [(loss({**start, name: value}), value) for value in grid.values]
        found[name] = min(lines)[1]
    return found, []


def beyond_the_grid(run: ProofRun) -> None:
    """An optimum three values beyond a grid's end, half of the settings diverged; none twice."""
    extensions = run.contender(4, null=0, null_is="grids that are not extended")
    rates = SearchGrid((0.001, 0.002, 0.004), 0.001, "log")
    space = {"rate": rates, "decay": SearchGrid((0.0, 0.1, 0.2), 0.0, "linear", least=0.0)}

    def loss(point: GridPoint) -> float:
        if point["rate"] > 0.04 or point["decay"] > 0.15:
            return math.nan
        return math.log(point["rate"] / 0.032) ** 2 + point["decay"]

    found, asked = _descended(space, loss, extensions)
    off = abs(math.log2(found["rate"] / 0.032)) + 10 * found["decay"]
    run.at_most("values by which the optimum beyond a grid is missed", off, 0.0, part="check")
    twice = len(asked) - len({key_of(point) for point in asked})
    run.at_most("settings that were asked for twice", twice, 0, part="check")


def the_known_speedup(run: ProofRun) -> None:
    """D_eff of the reference itself is D, and a planted speed-up of 1.3 comes out."""
    run.progress("recovering known speed-ups")
    fitted = run.contender(
        _speedups, null=_without_floor, null_is="a power law without the floor of the loss"
    )
    law = DataLaw(alpha=60.0, exponent=0.45, floor=1.1)
    data = [2e5 * ratio for ratio in RATIOS]
    noise = ((2e-4, -1e-4, 1e-4), (-1e-4, 2e-4, -2e-4))
    for seeds, tolerance in ((1, 1e-3), (2, 0.02)):
        own: DataLosses = {}
        faster: DataLosses = {}
        for place, size in enumerate(data):
            add = [0.0] if seeds == 1 else [one[place % 3] for one in noise]
            own[size] = [law.loss(size) + each for each in add]
            faster[size] = [law.loss(1.3 * size) + each for each in reversed(add)]
        words = "without noise" if seeds == 1 else "with noise of two seeds"
        for planted, losses in ((1.0, own), (1.3, faster)):
            off = max(abs(found / planted - 1) for found in fitted(own, losses))
            sentence = f"error of a speed-up of {planted:g}, {words}"
            run.at_most(sentence, off, tolerance, part="check")


def _speedups(reference: DataLosses, method: DataLosses) -> list[float]:
    return [one.speedup or math.inf for one in data_speedups(reference, method)]


def _without_floor(reference: DataLosses, method: DataLosses) -> list[float]:
    """By alpha D^-B through the means, in logarithms."""
    points = [(math.log(size), math.log(statistics.fmean(y))) for size, y in reference.items()]
    line = statistics.linear_regression([x for x, _ in points], [y for _, y in points])
    return [
        math.exp((math.log(statistics.fmean(y)) - line.intercept) / line.slope) / size
        for size, y in method.items()
    ]
