"""What a fair benchmark found, as plain values: never one number, but one a size and data ratio."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from modicum.core.data_speedup import DataSpeedup
from modicum.core.scaling_fit import HeldOutFit
from modicum.optim.fair_search import Sensitivity

SeedLosses = tuple[float, ...]


@dataclass(frozen=True)
class RegimeFinding:
    """One side in one regime.

    Args:
        settings: the best ones; None where none had a finite loss.
        tuned: the loss by which they were chosen.
        losses: of fresh seeds, at these settings; +inf where one diverged, none while unknown.
        default_losses: of the same seeds, at the default.
        deviation: of losses over seeds, which near-optimal settings are measured by.
        near: how many settings are near-optimal; `tried` how many there were.
        complete: whether some near-optimal settings have all their neighbours tried.
        edges: where the best settings lie at an end of a grid.
        metrics: means over the seeds that judged, such as seconds and bytes.
    """

    side: str
    parameters: int
    ratio: float
    tokens: int
    settings: Mapping[str, Any] | None
    tuned: float
    losses: SeedLosses
    default_losses: SeedLosses
    deviation: float
    near: int
    tried: int
    complete: bool
    edges: Mapping[str, Any]
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class SpeedupFinding:
    """A data speed-up of a side over another (or itself, untuned) at a size and data ratio."""

    side: str
    over: str
    parameters: int
    ratio: float
    speedup: DataSpeedup


@dataclass(frozen=True)
class Crossing:
    """Two sides whose curves change ranks in a regime, at these shares of training."""

    one: str
    other: str
    parameters: int
    ratio: float
    shares: tuple[float, ...]


@dataclass(frozen=True)
class FairReport:
    """All that was found.

    Args:
        reference: the side whose curve speed-ups are measured on.
        sensitivity: each side's hyper-parameters.
        laws: of those that are sensitive and numbers, h(N, R) with the last regime held out.
        speedups: of every side over the reference, itself among them.
        over_default: of every side at its best settings over its default, in data.
        notes: what makes the comparison less than fair, in sentences.
    """

    reference: str
    findings: tuple[RegimeFinding, ...]
    sensitivity: Mapping[str, tuple[Sensitivity, ...]]
    laws: Mapping[str, Mapping[str, HeldOutFit]]
    speedups: tuple[SpeedupFinding, ...]
    over_default: tuple[SpeedupFinding, ...]
    crossings: tuple[Crossing, ...]
    notes: tuple[str, ...]

    @property
    def fair(self) -> bool:
        """Whether nothing is to be noted."""
        return not self.notes

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values; a loss of +inf is the text `diverged`."""
        found = asdict(self) | {"fair": self.fair}
        for name in ("speedups", "over_default"):
            found[name] = [
                {**asdict(one), "speedup": one.speedup.to_json()} for one in getattr(self, name)
            ]
        plain: dict[str, Any] = _plain(found)
        return plain


def _plain(value: Any) -> Any:
    """JSON values: lists for tuples, a text for a loss that is not finite."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "diverged"
    return value
