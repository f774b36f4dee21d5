"""What a trial ends with, and what the engine asks for: a side, its settings, a seed and a part.

The engine knows nothing else of training. A trial may be a run folder in a child process, a proof's
run in its own, or a formula.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

from modicum.core.errors import InputError

Status = Literal["finished", "diverged", "out_of_memory", "crashed", "refused"]
TrialPart = Literal["tune", "judge"]
"""A trial that looks for settings, or one of a fresh seed that judges those that were chosen."""
Settings = Mapping[str, Any]
"""Recipe paths, or names of arguments, and their JSON values."""
_TEXTS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


@dataclass(frozen=True)
class Outcome:
    """How one training ended.

    A finished one whose loss is no finite number has diverged.

    Args:
        status: `diverged` counts as a loss of +inf; `out_of_memory`, `crashed` and `refused` have
            no loss at all.
        loss: on validation data, in nats per token or whatever is compared; less is better.
        test: losses on data that no choice looked at, by name; of the part `judge` alone.
        metrics: other figures by name.
        tokens: that were trained on.
        seconds: of training. Never part of what is judged.
        bytes: by kind, such as `peak`, `state`, `trained`.
        data_hash: of the tokens in the order in which they were trained on.
        folder: where the run is.
        message: why it did not finish, in one sentence.
        taken: whether another study trained it alike, so that its seconds are not known.

    Raises:
        InputError: a status that is none, or a finished trial without a loss.

    >>> Outcome("finished", loss=float("nan")).status
    'diverged'
    """

    status: Status
    loss: float | None = None
    test: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    tokens: int | None = None
    seconds: float | None = None
    bytes: Mapping[str, int] = field(default_factory=dict)
    data_hash: str = ""
    folder: str = ""
    message: str = ""
    taken: bool = False

    def __post_init__(self) -> None:
        if self.status not in get_args(Status):
            raise InputError(
                "no such status of a trial",
                field="status",
                value=self.status,
                allowed=", ".join(get_args(Status)),
                candidates=get_args(Status),
            )
        if self.status == "finished" and self.loss is None:
            raise InputError("a finished trial has a loss", field="loss", value=None)
        if self.status == "finished" and not math.isfinite(self.loss or 0.0):
            object.__setattr__(self, "status", "diverged")
        if self.status != "finished":
            object.__setattr__(self, "loss", None)

    @property
    def score(self) -> float | None:
        """The loss, +inf where training diverged, None where there is none."""
        return math.inf if self.status == "diverged" else self.loss

    def figure(self, name: str) -> float | None:
        """As `score`, of the validation loss (`loss`) or of a test loss by its name."""
        if name == "loss" or self.status != "finished":
            return self.score
        value = self.test.get(name)
        return value if value is None or math.isfinite(value) else math.inf

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values; numbers that are not finite as texts."""
        found = {**self.__dict__, "bytes": dict(self.bytes)}
        for name in ("test", "metrics"):
            found[name] = {key: _plain(value) for key, value in found[name].items()}
        return found

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Outcome:
        """The outcome that `to_json` wrote.

        Raises:
            InputError: it is none.
        """
        try:
            found = dict(values)
            for name in ("test", "metrics"):
                found[name] = {
                    key: _TEXTS.get(value, value) if isinstance(value, str) else float(value)
                    for key, value in found[name].items()
                }
            return cls(**found)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"this is no outcome of a trial: {error}") from None


class Trial(Protocol):
    """Trains a side with these settings from this seed.

    The first weights and the order of tokens are functions of the seed alone, so that sides are
    compared on the same of both. What it raises is this trial's outcome, but for what stops
    the process. It must come to the same losses whenever it is called with the same arguments.

    With `parallel` above one it is called from several threads (or from the executor's processes).
    A trial that starts processes may have a method `stop()`, which is called where a study ends
    before its trials did.
    """

    def __call__(self, side: str, settings: Settings, seed: int, part: TrialPart) -> Outcome:
        """`settings` are the side's fixed ones and those that are tuned."""


def trial_name(side: str, settings: Settings, seed: int, part: TrialPart) -> str:
    """A name for a trial's file or folder, by all that it is called with.

    >>> trial_name("adamw", {"optimizer.learning_rate": 0.01}, 0, "tune")
    'adamw-tune-0-e17665c74004'
    """
    key = json.dumps([side, settings, seed, part], sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '_', side)[:60]}-{part}-{seed}-{digest}"


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else repr(float(value))
