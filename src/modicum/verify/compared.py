"""Where two traces of the same steps first differ: which entry of what, after which step, how far.

Digests find the place. How far two tensors are apart is known where both states are kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from modicum.verify.findings import Wanting
from modicum.verify.traces import StepTrace

Line = Mapping[str, Any]
SAME = "as in the uninterrupted run"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes


def first_differences(
    one: Sequence[StepTrace], other: Sequence[StepTrace], first: int
) -> list[Wanting]:
    """The findings of the first step, from `first` on, in which anything differs.

    One finding for each kind of thing: the rows, the batches, each view of the state, each result.

    Args:
        one: the measure, of each rank.
        other: what is held against it, of as many ranks.
    """
    pairs = [(a, b, a.lines(), b.lines()) for a, b in zip(one, other, strict=True)]
    steps = sorted({step for _, _, lines, _ in pairs for step in lines if step >= first})
    for step in steps:
        found = [
            finding
            for a, b, mine, theirs in pairs
            for finding in _of_step(a, b, mine.get(step), theirs.get(step), step)
        ]
        if found:
            return list({finding.what: finding for finding in reversed(found)}.values())[::-1]
    return []


def _of_step(
    one: StepTrace, other: StepTrace, mine: Line | None, theirs: Line | None, step: int
) -> Iterator[Wanting]:
    rank = f" of rank {one.rank}" if one.rank else ""
    if mine is None or theirs is None:
        yield Wanting("steps", f"step {step}{rank}", "one in both", "none in one of them")
        return
    for what in ("rows", "batches"):
        if mine.get(what) != theirs.get(what):
            where = f"step {step}{rank}"
            yield Wanting(what, where, _short(mine[what]), _short(theirs[what]))
    for view in sorted({*mine["state"], *theirs["state"]}):
        own, found = mine["state"].get(view, {}), theirs["state"].get(view, {})
        keys = [key for key in sorted({*own, *found}) if own.get(key) != found.get(key)]
        if keys:
            where = f"{keys[0]} after step {step - 1}{rank}"
            amount = _amount(own, found, keys[0], one, other, step - 1, view)
            more = f"; {len(keys)} of {len({*own, *found})} entries differ"
            yield Wanting(view, where, SAME, amount + more)
    yield from result_differences(mine.get("results", {}), theirs.get("results", {}), step)


def result_differences(
    mine: Line, theirs: Line, step: int, tolerance: float = 0.0
) -> Iterator[Wanting]:
    """What of two rows of metrics is further apart than a relative tolerance; 0: to the bit."""
    for name in dict.fromkeys([*mine, *theirs]):
        one, two = mine.get(name), theirs.get(name)
        if one != two and relative(one, two) > tolerance:
            yield Wanting(name, f"step {step}", f"{one}", f"{two} ({_apart(one, two)})")


def relative(one: Any, two: Any) -> float:
    """How far two values are apart, over the first; infinite where one is no number.

    >>> relative(2.0, 2.5), relative(None, 1.0), relative(None, None)
    (0.25, inf, 0.0)
    """
    if one == two:
        return 0.0
    if any(not isinstance(each, int | float) for each in (one, two)) or not one:
        return math.inf
    return abs(two - one) / abs(one)


def tensor_distance(one: Tensor, two: Tensor) -> float:
    """The norm of the difference of two tensors over that of the first.

    Zero where their bits are equal, NaN included; infinite for other shapes or dtypes, and where
    an element is not finite.

    >>> import torch
    >>> tensor_distance(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
    0.1
    """
    if one.shape != two.shape or one.dtype != two.dtype:
        return math.inf
    if one.is_complex():
        one, two = torch.view_as_real(one), torch.view_as_real(two)
    bits = _INTEGERS[one.element_size()]
    if torch.equal(one.view(bits), two.view(bits)):
        return 0.0
    mine, theirs = one.double(), two.double()
    size, apart = float(mine.norm()), float((mine - theirs).norm())
    if not (math.isfinite(size) and math.isfinite(apart)):
        return math.inf
    return apart / size if size else (math.inf if apart else 0.0)


def _apart(one: Any, two: Any) -> str:
    amount = relative(one, two)
    return f"{amount:.2g} of it apart" if math.isfinite(amount) else "another"


def _amount(
    own: Mapping[str, str], found: Mapping[str, str], key: str,
    one: StepTrace, other: StepTrace, step: int, view: str,
) -> str:  # fmt: skip
    """How far an entry is from what it should be, in words."""
    if key not in own or key not in found:
        return "an entry too many" if key in found else "no such entry"
    values = one.entry(step, view, key), other.entry(step, view, key)
    if not all(isinstance(value, Tensor) for value in values):
        return f"{found[key]} for {own[key]}" if None in values else f"{values[1]} for {values[0]}"
    mine, theirs = values
    if not mine.is_floating_point() and mine.shape == theirs.shape:
        return f"{int((mine != theirs).sum())} of {mine.numel()} elements are others"
    return f"{tensor_distance(mine, theirs):.2g} of its norm apart"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
