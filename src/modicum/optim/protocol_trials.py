"""What protocols ask for and are given: regimes, trials and what these came to."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from modicum.core.errors import InputError

LossCurve = Sequence[tuple[float, float]]
"""(share of training, loss), ascending; of a trial that judges."""


@dataclass(frozen=True)
class ProtocolRegime:
    """A size of model with an amount of data.

    Args:
        parameters: N, next to embeddings.
        ratio: R, the data in units of `tokens_per_parameter` N.

    >>> ProtocolRegime(50_000, 0.5).tokens
    500000
    """

    parameters: int
    ratio: float
    tokens_per_parameter: float = 20.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value > 0):
                raise InputError("expected a positive finite number", field=name, value=value)

    @property
    def tokens(self) -> int:
        """D, the tokens that a trial is trained on."""
        return round(self.tokens_per_parameter * self.parameters * self.ratio)


@dataclass(frozen=True)
class ProtocolTrial:
    """A training that is asked for.

    Args:
        settings: a value for each hyper-parameter of the side.
        part: `tune`, or `judge` for one of a fresh seed that no choice has looked at.
    """

    side: str
    regime: ProtocolRegime
    settings: Mapping[str, Any]
    seed: int
    part: Literal["tune", "judge"]

    @property
    def key(self) -> str:
        """A text for the trial, the same for the same values."""
        return json.dumps(asdict(self), sort_keys=True)

    def to_json(self) -> dict[str, Any]:
        """The trial as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ProtocolTrial:
        """The trial that `to_json` gave; lists among its settings may have been tuples."""
        return cls(**{**values, "regime": ProtocolRegime(**values["regime"])})


@dataclass(frozen=True)
class TrialResult:
    """What a trial came to: +inf where training diverged.

    Args:
        curve: of losses in training.
        metrics: other figures by name, such as seconds and bytes; never part of what is judged.
    """

    loss: float
    curve: LossCurve = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
