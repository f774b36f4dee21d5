"""What all sides of a comparison may spend alike: tokens, seconds, or bytes of a kind.

A budget becomes settings of each side's recipe before anything is tuned. Of tokens and seconds it
decides the length of the runs. Of bytes it decides the size of each method: the field that its
search table calls its size is raised until the forecast reaches the budget; a side without such a
field stays as it is and stands next to the others as reference. A side that ends up more than 3 %
away from the budget has a sentence that says why.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, get_args

from modicum.core.errors import DoesNotFit, InputError
from modicum.core.units import format_bytes, parse_bytes, parse_count

if TYPE_CHECKING:
    from modicum.planner import Plan
    from modicum.recipe import Recipe

BudgetKind = Literal["tokens", "seconds", "state", "peak", "trained"]
KINDS: tuple[str, ...] = get_args(BudgetKind)
_FORMAT = "tokens=500k, seconds=300, state=8MB, peak=2GB or trained=100kB"
# Of the seconds, what is left for evaluations and for steps that take longer than the median.
_SLACK = 0.95
# How far a side's bytes may be from the budget, so that sides are called equal; and how near they
# are enough that no better size is looked for.
EQUAL, _ENOUGH = 0.03, 0.005
_NEVER = 1 << 62  # bytes of a size that layers do not take
_FEW = 8  # sizes, such as those of a list, that are all planned


@dataclass(frozen=True)
class SharedBudget:
    """What each run of each side may spend.

    >>> SharedBudget.parse("tokens=500k"), SharedBudget.parse("state=8MB").said
    (SharedBudget(kind='tokens', amount=500000), 'state 8 MB')
    """

    kind: BudgetKind
    amount: float

    @classmethod
    def parse(cls, text: str) -> SharedBudget:
        """The budget that `--budget` states.

        Raises:
            InputError: it cannot be read.
        """
        kind, separator, amount = text.partition("=")
        if kind not in KINDS or not separator:
            raise InputError("not a budget", field="--budget", value=text, allowed=_FORMAT,
                             candidates=KINDS, word=kind)  # fmt: skip
        readers: Mapping[str, Callable[[str], float]] = {"tokens": parse_count, "seconds": float}
        try:
            value = readers.get(kind, parse_bytes)(amount)
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise InputError("not an amount", field="--budget", value=text, allowed=_FORMAT)
        return cls(kind, value)  # type: ignore[arg-type]

    @property
    def said(self) -> str:
        """For people."""
        if self.kind == "tokens":
            return f"{self.amount:,.0f} tokens"
        if self.kind == "seconds":
            return f"{self.amount:g} seconds"
        return f"{self.kind} {format_bytes(self.amount)}"

    @property
    def in_bytes(self) -> bool:
        """Whether it decides sizes, and not the length of runs."""
        return self.kind not in ("tokens", "seconds")


def spent_of(plan: Plan, kind: str) -> int:
    """Bytes that a plan foresees of a budget's kind.

    Args:
        kind: `state`, what the optimizer keeps between updates; `peak`, all tensors at the most;
            `trained`, the trained weights.
    """
    prediction = plan.prediction
    if kind == "peak":
        return prediction.peak_bytes
    if kind == "trained":
        return 4 * prediction.trainable
    entries = prediction.ledger.entries
    return sum(entry.bytes for entry in entries if entry.kind == "optimizer")


@dataclass(frozen=True)
class Sized:
    """How large a side was made to reach a budget in bytes.

    Args:
        settings: of its recipe; none where it has no field for it.
        bytes: that the forecast says then.
        reference: whether it has no size, and stands next to the others as it is.
        unequal: why it is not at the budget, in a sentence; empty where it is.
    """

    settings: Mapping[str, Any]
    bytes: int
    reference: bool = False
    unequal: str = ""


def sized(
    recipe: Recipe,
    budget: SharedBudget,
    field: str | None,
    sizes: Sequence[Any],
    plan: Callable[[Recipe], Plan],
) -> Sized:
    """The largest size whose forecast keeps the budget.

    Of sizes that are no integers it may be one that leaves half a percent of it.

    Args:
        field: the recipe's path of the size; None: the side has none.
        sizes: that may be tried, in the order of their bytes from either end.
        plan: of a recipe, whether it fits into memory or not.

    Raises:
        DoesNotFit: the smallest size is above the budget already.
        InputError: not even the smallest can be planned.
    """
    if field is None:
        return _as_it_is(spent_of(plan(recipe), budget.kind), budget)
    tried = _Tried(sizes, lambda size: spent_of(plan(set_in(recipe, {field: size})), budget.kind))
    sizes, spent = tried.sizes, tried.spent
    if spent(0) > budget.amount:
        least = f"{field} {sizes[0]}, takes {format_bytes(spent(0))}"
        raise DoesNotFit(f"its smallest size, {least}, and the budget is {budget.said}: raise it")
    keeps = {place: known <= budget.amount for place, known in tried.known.items()}
    low = max(place for place, kept in keeps.items() if kept)
    above = min((place for place, kept in keeps.items() if not kept), default=len(sizes))
    enough = budget.amount * (1 - _ENOUGH * isinstance(sizes[0], float))
    while low + 1 < above and spent(low) < enough:
        middle = _between(low, above, tried.known, budget.amount)
        low, above = (middle, above) if spent(middle) <= budget.amount else (low, middle)
    unequal = ""
    if spent(low) < (1 - EQUAL) * budget.amount:
        why = "is the largest that it takes"
        if above < len(sizes) and spent(above) < _NEVER:
            why = f"is the last below it, and with {_size(sizes[above])} it would have "
            why += format_bytes(spent(above))
        unequal = f"{_of(budget, spent(low))}: {field} {_size(sizes[low])} {why}"
    return Sized({field: sizes[low]}, spent(low), unequal=unequal)


class _Tried:
    """Sizes in the order of their bytes, as far as those are known.

    Args:
        sizes: ascending or descending in bytes; of a few in any order.
        plan: the bytes of a size; it raises where layers do not take it.

    Raises:
        InputError: none of them can be planned, or not the first of those that rise.
    """

    def __init__(self, sizes: Sequence[Any], plan: Callable[[Any], int]) -> None:
        self.sizes, self.known, self._plan = sizes, dict[int, int](), plan
        count = len(sizes)
        looked_at = range(count) if count <= _FEW else (0, count // 2, count - 1)
        places = [place for place in looked_at if self.spent(place) < _NEVER]
        if count <= _FEW:
            self._take(sorted(places, key=self.spent))
        elif len(places) > 1 and self.spent(places[-1]) < self.spent(places[0]):
            last = bisect_left(range(count), True, key=lambda place: self.spent(place) == _NEVER,
                               lo=places[-1])  # fmt: skip
            self._take(range(last - 1, -1, -1))
        if not self.sizes or self.spent(0) == _NEVER:
            plan(sizes[0])  # which says why

    def spent(self, place: int) -> int:
        """The bytes of a size, more than there can be where layers do not take it."""
        if place not in self.known:
            try:
                self.known[place] = self._plan(self.sizes[place])
            except InputError:  # no such size for these layers, such as a rank above their width
                self.known[place] = _NEVER
        return self.known[place]

    def _take(self, places: Sequence[int]) -> None:
        """Leave these sizes, in this order."""
        new = {place: number for number, place in enumerate(places)}
        self.sizes = [self.sizes[place] for place in places]
        self.known = {new[place]: spent for place, spent in self.known.items() if place in new}


def _between(low: int, above: int, known: Mapping[int, int], amount: float) -> int:
    """Which size to try between one that keeps the budget and one that does not.

    Bytes are nearly linear in the size, so a line through both finds it in few plans; in every
    other step they are halved, so that it never takes many.
    """
    over = known.get(above, _NEVER)
    if over == _NEVER or len(known) % 2:
        return (low + above) // 2
    share = (amount - known[low]) / (over - known[low])
    return min(max(low + 1, low + int(share * (above - low))), above - 1)


def _as_it_is(spent: int, budget: SharedBudget) -> Sized:
    """A side that has no size."""
    if abs(spent - budget.amount) <= EQUAL * budget.amount:
        return Sized({}, spent, reference=True)
    why = f"{_of(budget, spent)}: it has no size that could be changed"
    return Sized({}, spent, reference=True, unequal=why)


def _of(budget: SharedBudget, spent: int) -> str:
    words = {"state": "of optimizer state", "peak": "at its peak", "trained": "of trained weights"}
    return f"has {format_bytes(spent)} {words[budget.kind]}, not {format_bytes(budget.amount)}"


def _size(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def steps_for(budget: SharedBudget, seconds: Sequence[Sequence[float]], warmup: int) -> int:
    """How many updates a budget of seconds is enough for.

    Args:
        seconds: of single updates, a list for each time that they were measured.
        warmup: of these, in which the learning rate rises; there must be one after them.

    Raises:
        InputError: it is not enough for these, or none was timed.

    >>> steps_for(SharedBudget("seconds", 10), [[0.5, 0.5], [0.5]], 4)
    19
    """
    asked = f"seconds={budget.amount:g}"
    timed = [value for times in seconds for value in times]
    if not timed:
        problem = "its updates could not be timed: its runs ended before there were enough"
        raise InputError(problem, field="--budget", value=asked)
    step = median(timed)
    steps = int(_SLACK * budget.amount / step)
    if steps <= warmup:
        needs = f", and the warm-up alone needs {warmup}" if warmup else ""
        raise InputError(
            f"an update takes {step:.2g} s, so this is enough for {steps} updates{needs}",
            field="--budget",
            value=asked,
        )
    return steps


def set_in(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    """The recipe with settings by their paths."""
    return recipe.changed(**{path.replace(".", "__"): value for path, value in settings.items()})
