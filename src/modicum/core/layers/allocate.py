"""One total shared over layers: who gets how much, so that the gain is the largest there is.

A layer's *curve* says what each amount of something (a rank, bits, neurons) is worth there and what
it costs: parameters, bytes, FLOPs, or measured seconds as nanoseconds. Costs are integers, so that
the total is kept to the unit. Which of the best allocations is given is fixed, on every machine.

Where a layer has a score and no curve, `in_proportion` shares the total by the scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from modicum.core.errors import InputError

# Of what the search keeps at a time; above it an allocation may be a little less than the best.
_STATES = 1 << 20


@dataclass(frozen=True)
class GainCurve:
    """What a layer may get: amounts, rising; and of each what it costs and what it is worth.

    The first amount is the least that the layer needs.

    Raises:
        InputError: lengths differ, there is nothing, amounts do not rise, or a value is not finite.
    """

    amounts: tuple[int, ...]
    costs: tuple[int, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not len(self.amounts) == len(self.costs) == len(self.values) > 0:
            problem = "amounts, costs and values are as many, and at least one each"
            raise InputError(problem, field="amounts", value=len(self.amounts))
        if any(one >= other for one, other in pairwise(self.amounts)):
            raise InputError("amounts rise", field="amounts")
        for name, kind in (("amounts", int), ("costs", int), ("values", int | float)):
            if not all(isinstance(each, kind) for each in getattr(self, name)):
                problem = "amounts and costs are integers; give seconds as nanoseconds"
                raise InputError(problem, field=name)
        if not torch.tensor(self.values, dtype=torch.float64).isfinite().all():
            raise InputError("a value is not finite", field="values")

    @classmethod
    def of_gains(
        cls,
        gains: Iterable[float],
        *,
        cost: int,
        floor: int = 0,
        cap: int | None = None,
        multiple: int = 1,
    ) -> GainCurve:
        """The curve of a layer in which unit k adds `gains[k]` and every unit costs the same.

        Args:
            floor, cap: the least and the most units; `cap` None: as many as there are gains.
            multiple: units come so many at a time, but for the floor and the last ones.

        Raises:
            InputError: the floor is above the cap, or below zero.

        >>> GainCurve.of_gains([4.0, 2.0, 1.0], cost=5, floor=1)
        GainCurve(amounts=(1, 2, 3), costs=(5, 10, 15), values=(4.0, 6.0, 7.0))
        """
        sums = [0.0, *accumulate(float(gain) for gain in gains)]
        most = len(sums) - 1 if cap is None else min(cap, len(sums) - 1)
        if not 0 <= floor <= most:
            raise InputError(
                "not between 0 and the cap", field="floor", value=floor, allowed=f"up to {most}"
            )
        inside = (n for n in range(0, most + 1, multiple) if floor < n < most)
        amounts = tuple(dict.fromkeys((floor, *inside, most)))
        return cls(amounts, tuple(cost * n for n in amounts), tuple(sums[n] for n in amounts))


@dataclass(frozen=True)
class Allocation:
    """What each layer gets.

    Args:
        cost: of all together, at most the total.
        value: of all together.
        at_most: no allocation is worth more; `value` itself where it is known to be the best.
    """

    amounts: dict[str, int]
    cost: int
    value: float
    at_most: float

    def as_json(self) -> dict[str, Any]:
        """The allocation as plain values."""
        return {name: getattr(self, name) for name in ("amounts", "cost", "value", "at_most")}


def allocate(curves: Mapping[str, GainCurve], total: int) -> Allocation:
    """The amounts of the largest value whose costs are at most `total`.

    Where each layer's gain for its cost falls from unit to unit and all units cost the same, the
    best units are taken one by one. Else the best is searched: sums of layers are built up, those
    that cost more and are worth less than others are dropped, and so are those that could not
    become better than what is known, by the fractional optimum of the layers to come. It is exact;
    only past a million sums at a time the least promising are dropped, and `at_most` says how far
    the best may be.

    Raises:
        InputError: the layers' least amounts cost more than the total.

    Source: the multiple-choice knapsack problem; Sinha and Zoltners, Operations Research 27 (1979),
    for the fractional bound.

    >>> first, second = GainCurve.of_gains([9, 4, 1], cost=2), GainCurve.of_gains([5] * 3, cost=3)
    >>> allocate({"a": first, "b": second}, 9).amounts
    {'a': 1, 'b': 2}
    """
    least = sum(min(curve.costs) for curve in curves.values())
    if least > total:
        raise InputError(
            f"the layers' least amounts cost {least} already", field="total", value=total
        )
    picked = _units(curves, total) or _search(curves, total)
    chosen, bound = picked
    cost = sum(curve.costs[chosen[name]] for name, curve in curves.items())
    value = sum(curve.values[chosen[name]] for name, curve in curves.items())
    amounts = {name: curve.amounts[chosen[name]] for name, curve in curves.items()}
    return Allocation(amounts, cost, value, max(value, bound))


def _units(curves: Mapping[str, GainCurve], total: int) -> tuple[dict[str, int], float] | None:
    """The choice by taking the best units first; None where that may miss the best."""
    steps = []
    each: set[int] = set()
    for name, curve in curves.items():
        costs = [after - before for before, after in pairwise(curve.costs)]
        gains = [after - before for before, after in pairwise(curve.values)]
        falling = all(one >= other for one, other in pairwise(gains))
        each.update(costs)
        if len(each) > 1 or not falling or any(cost <= 0 for cost in costs):
            return None
        steps += [(-gain, name, index) for index, gain in enumerate(gains, start=1) if gain > 0]
    left = total - sum(curve.costs[0] for curve in curves.values())
    chosen = dict.fromkeys(curves, 0)
    if each:
        for _, name, index in sorted(steps)[: left // each.pop()]:
            chosen[name] = index  # gains fall, so a layer's units come in their order
    return chosen, float("-inf")


@dataclass(frozen=True)
class _Options:
    """A layer's options that are worth more than all cheaper ones: costs and values rise."""

    indices: Tensor
    costs: Tensor
    values: Tensor

    @classmethod
    def of(cls, curve: GainCurve) -> _Options:
        order = sorted(range(len(curve.costs)), key=lambda k: (curve.costs[k], -curve.values[k], k))
        kept: list[int] = []
        for k in order:
            if not kept or curve.values[k] > curve.values[kept[-1]]:
                kept.append(k)
        return cls(
            torch.tensor(kept),
            torch.tensor([curve.costs[k] for k in kept]),
            torch.tensor([curve.values[k] for k in kept], dtype=torch.float64),
        )

    def hull(self) -> list[tuple[float, int, float]]:
        """The steps (gain for cost, cost, gain) of the least concave curve above the options."""
        hull: list[tuple[int, float]] = []
        for point in zip(self.costs.tolist(), self.values.tolist(), strict=True):
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], point):
                hull.pop()
            hull.append(point)
        return [(_slope(a, b), b[0] - a[0], b[1] - a[1]) for a, b in pairwise(hull)]


def _slope(one: tuple[int, float], other: tuple[int, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])


class _Bound:
    """The fractional optimum of some layers beyond their cheapest options, for any budget."""

    def __init__(self, steps: Sequence[tuple[float, int, float]]) -> None:
        best = sorted(steps, reverse=True)
        self.costs = torch.tensor([0, *accumulate(cost for _, cost, _ in best)])
        gains = [0.0, *accumulate(gain for _, _, gain in best)]
        self.gains = torch.tensor(gains, dtype=torch.float64)
        self.rates = torch.tensor([*(rate for rate, _, _ in best), 0.0], dtype=torch.float64)

    def __call__(self, budgets: Tensor) -> Tensor:
        place = torch.searchsorted(self.costs, budgets, right=True) - 1
        return self.gains[place] + (budgets - self.costs[place]) * self.rates[place]


def _search(curves: Mapping[str, GainCurve], total: int) -> tuple[dict[str, int], float]:
    """The choice by building up sums of layers, and a bound where some had to be dropped."""
    options = {name: _Options.of(curve) for name, curve in curves.items()}
    names = list(options)
    steps = {name: each.hull() for name, each in options.items()}
    behind = [
        [step for other in names[at + 1 :] for step in steps[other]] for at in range(len(names))
    ]
    bases = [(int(each.costs[0]), float(each.values[0])) for each in options.values()]
    known, dropped = _rounded(options, total), float("-inf")
    costs, values = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
    trail: list[tuple[Tensor, Tensor]] = []
    for at, name in enumerate(names):
        option = options[name]
        rest_cost = sum(cost for cost, _ in bases[at + 1 :])
        rest_value = sum(value for _, value in bases[at + 1 :])
        sums = (costs[:, None] + option.costs).flatten()
        worth = (values[:, None] + option.values).flatten()
        budgets = total - rest_cost - sums
        fits = (budgets >= 0).nonzero().flatten()
        hope = worth[fits] + rest_value + _Bound(behind[at])(budgets[fits])
        # Rounding must not drop what is as good as the best that is known.
        fits = fits[hope >= known - 1e-9 * abs(known)]
        fits = fits[_undominated(sums[fits], worth[fits])]
        if len(fits) > _STATES:
            hope = worth[fits] + rest_value + _Bound(behind[at])(total - rest_cost - sums[fits])
            ranked = hope.argsort(descending=True, stable=True)
            dropped = max(dropped, float(hope[ranked[_STATES]]))
            fits = fits[ranked[:_STATES].sort().values]
        trail.append((fits // len(option.costs), option.indices[fits % len(option.costs)]))
        costs, values = sums[fits], worth[fits]
    at = int(values.argmax())
    chosen: dict[str, int] = {}
    for name, (parents, picks) in zip(reversed(names), reversed(trail), strict=True):
        chosen[name] = int(picks[at])
        at = int(parents[at])
    return chosen, dropped


def _rounded(options: Mapping[str, _Options], total: int) -> float:
    """The value of a good allocation: steps of the hulls, the best first, as far as they fit."""
    left = total - sum(int(each.costs[0]) for each in options.values())
    value = sum(float(each.values[0]) for each in options.values())
    steps = [
        (-rate, name, index, cost, gain)
        for name, each in options.items()
        for index, (rate, cost, gain) in enumerate(each.hull())
    ]
    stopped: set[str] = set()
    for _, name, _, cost, gain in sorted(steps):
        if name not in stopped and cost <= left:
            left, value = left - cost, value + gain
        else:
            stopped.add(name)
    return value


def _undominated(costs: Tensor, values: Tensor) -> Tensor:
    """Places of sums that are worth more than all that cost less or as much; costs rise."""
    if not len(costs):
        return torch.zeros(0, dtype=torch.int64)
    order = values.argsort(descending=True, stable=True)
    order = order[costs[order].argsort(stable=True)]
    best = values[order].cummax(0).values
    first = torch.ones(len(order), dtype=torch.bool)
    first[1:] = values[order][1:] > best[:-1]
    return order[first]


def in_proportion(
    scores: Mapping[str, float], total: int, caps: Mapping[str, int]
) -> dict[str, int]:
    """Amounts in proportion to scores, none above its cap; they add up to `total`.

    What layers at their caps leave is handed out again, to the others in proportion. Where the
    scores that are left are zero, it is shared in proportion to the caps. Of units that no share
    gives in full the largest parts get one each, of equal parts the first.

    Raises:
        InputError: a score is negative or not finite, or the total is above the caps' sum.

    >>> in_proportion({"a": 8.0, "b": 1.0, "c": 1.0}, 10, {"a": 4, "b": 9, "c": 9})
    {'a': 4, 'b': 3, 'c': 3}
    """
    most = sum(caps[name] for name in scores)
    if not 0 <= total <= most:
        problem, allowed = "more than layers may have", f"up to {most}"
        raise InputError(problem, field="total", value=total, allowed=allowed)
    for name, score in scores.items():
        if not 0 <= score < float("inf"):
            raise InputError(f"the score of {name} is no share", field="scores", value=score)
    given: dict[str, int] = {}
    while open_ones := [name for name in scores if name not in given]:
        left = total - sum(given.values())
        known: Mapping[str, float] = scores if any(scores[name] for name in open_ones) else caps
        # Fractions, so that shares add up to what is left.
        weights = {name: Fraction(known[name]) for name in open_ones}
        each = sum(weights.values()) or Fraction(1)
        shares = {name: left * weight / each for name, weight in weights.items()}
        capped = [name for name, share in shares.items() if share >= caps[name]]
        if capped:
            given |= {name: caps[name] for name in capped}
            continue
        parts = {name: int(share) for name, share in shares.items()}
        more = left - sum(parts.values())
        for name in sorted(shares, key=lambda name: parts[name] - shares[name])[:more]:
            parts[name] += 1
        given |= parts
    return {name: given[name] for name in scores}
