"""What methods of the slot `protocol` share: they say which trials to run, and train nothing.

Such a method is no optimizer and no part of a recipe. It is bound to sides and regimes, asks for
trials, is given their losses, and says what they amount to. Whoever runs the trials is another.

    runtime = FairOptim().bind(ProtocolContext(sides, regimes, reference="adamw"))
    while trials := runtime.ask():
        for trial in trials:
            runtime.tell(trial, loss_of(trial))
    report = runtime.report()
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from modicum.core.contracts.catalog import catalog
from modicum.core.contracts.method import Method
from modicum.core.errors import InputError
from modicum.optim.protocol_trials import (
    LossCurve,
    ProtocolRegime,
    ProtocolTrial,
    TrialResult,
)
from modicum.optim.search_grid import SearchGrid

SLOT = "protocol"
FORMAT = 1


@dataclass(frozen=True)
class ProtocolContext:
    """What a protocol is bound to.

    Args:
        sides: the grid of each hyper-parameter, by the side's name; two sides or more.
        regimes: in which they are compared, in any order; the last one by size and data is held
            out of fits.
        reference: the side whose curve speed-ups are measured on; the first where none is named.
        seed: of trials that tune; those that judge have the ones after it.

    Raises:
        InputError: there are fewer sides, no regime or one twice, no such reference, or a negative
            seed.
    """

    sides: Mapping[str, Mapping[str, SearchGrid]]
    regimes: Sequence[ProtocolRegime]
    reference: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.sides) < 2:
            problem = "a comparison has two sides at least"
            raise InputError(problem, field="sides", value=list(self.sides))
        places = {(regime.parameters, regime.tokens) for regime in self.regimes}
        if not self.regimes or len(places) < len(self.regimes):
            problem = "a comparison has one regime at least, and none twice"
            raise InputError(problem, field="regimes", value=len(self.regimes))
        if self.reference and self.reference not in self.sides:
            problem = "no such side takes part"
            raise InputError(
                problem, field="reference", value=self.reference, candidates=self.sides
            )
        if self.seed < 0:
            raise InputError("too small", field="seed", value=self.seed, allowed="at least 0")

    def to_json(self) -> dict[str, Any]:
        """What decides which trials are asked for first, as JSON values."""
        sides = {
            side: {name: grid.to_json() for name, grid in space.items()}
            for side, space in self.sides.items()
        }
        regimes = [asdict(regime) for regime in self.regimes]
        return {
            "sides": sides, "regimes": regimes, "reference": self.reference, "seed": self.seed
        }  # fmt: skip


class ProtocolRuntime(ABC):
    """A protocol at work. A subclass writes `wanted`, `take` and `report`.

    Its state is what it was given, in order, so a state that is loaded asks for what is left.
    """

    def __init__(self, method: Method, context: ProtocolContext) -> None:
        self.method, self.context = method, context
        given = {"method": method.info.name, **method.model_dump(mode="json"), **context.to_json()}
        self._identity = json.loads(json.dumps(given))
        self._results: list[tuple[ProtocolTrial, TrialResult]] = []
        self._seen: set[str] = set()
        self._waiting: dict[str, ProtocolTrial] = {}

    @abstractmethod
    def wanted(self) -> list[ProtocolTrial]:
        """Trials whose results are missing before anything else can be said."""

    @abstractmethod
    def take(self, trial: ProtocolTrial, result: TrialResult) -> None:
        """Take in the result of a trial that is wanted."""

    @abstractmethod
    def report(self) -> Any:
        """What the results so far amount to; its `to_json()` has all of it as JSON values."""

    def ask(self) -> list[ProtocolTrial]:
        """The trials to run now, in any order or at once; none: it has ended."""
        self._waiting = {trial.key: trial for trial in self.wanted()}
        return list(self._waiting.values())

    def tell(
        self,
        trial: ProtocolTrial,
        loss: float,
        *,
        curve: LossCurve = (),
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """The final loss of a trial that was asked for; what is no finite number has diverged.

        Raises:
            InputError: it was not asked for, or is known already.
        """
        key = trial.key
        if key not in self._waiting:
            self.ask()
        if key not in self._waiting:
            problem = "is known already" if key in self._seen else "was not asked for"
            raise InputError(problem, field="trial", value=trial.to_json())
        trial = self._waiting.pop(key)
        loss = float(loss) if math.isfinite(loss) else math.inf
        points = tuple((float(share), float(value)) for share, value in curve)
        result = TrialResult(loss, points, dict(metrics or {}))
        self._seen.add(key)
        self._results.append((trial, result))
        self.take(trial, result)

    @property
    def results(self) -> list[tuple[ProtocolTrial, TrialResult]]:
        """Every trial with what it came to, in the order in which it came."""
        return list(self._results)

    def state_dict(self) -> dict[str, Any]:
        """All that it was given, as JSON values."""
        rows = [
            {
                "trial": trial.to_json(),
                "loss": result.loss if math.isfinite(result.loss) else None,
                "curve": [list(point) for point in result.curve],
                "metrics": dict(result.metrics),
            }
            for trial, result in self._results
        ]
        return {"format": FORMAT, "identity": self._identity, "results": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take in what an earlier one was given.

        Raises:
            InputError: it was of another comparison, or this one was given something already.
        """
        if self._results:
            raise InputError("a state is loaded into a protocol that has no results yet")
        if state.get("format") != FORMAT or state.get("identity") != self._identity:
            problem = (
                "this is the state of another comparison: fields, sides, regimes or seed differ"
            )
            raise InputError(problem, field="state")
        for row in state["results"]:
            trial = ProtocolTrial.from_json(row["trial"])
            loss = math.inf if row["loss"] is None else row["loss"]
            curve = [(share, value) for share, value in row["curve"]]
            self.tell(trial, loss, curve=curve, metrics=row["metrics"])

    def close(self) -> None:
        """Forget the trials that are waited for; results stay."""
        self._waiting.clear()


class ComparisonProtocol(Method):
    """The value of a protocol. A subclass writes `bind`, which gives a `ProtocolRuntime`."""

    @abstractmethod
    def bind(self, context: ProtocolContext) -> ProtocolRuntime:
        """The protocol at work on these sides and regimes."""


def protocol_of(
    name: str,
    fields: Mapping[str, Any] | None = None,
    plugins: Iterable[str | Path] = (),
) -> ComparisonProtocol:
    """The protocol of this name in the catalog, with these fields.

    Raises:
        InputError: no method of the slot `protocol` has this name, or a field is wrong.

    >>> protocol_of("fair_optim", {"seeds": 5}).info.slot
    'protocol'
    """
    known = {key: r for key, r in catalog(plugins).items() if r.info.slot == SLOT}
    if name not in known:
        raise InputError(
            "no such protocol",
            field="protocol",
            value=name,
            allowed=", ".join(sorted(known)),
            candidates=known,
        )
    known[name].validate(fields or {}, prefix=f"{name}.")
    value = known[name].load()(**(fields or {}))
    assert isinstance(value, ComparisonProtocol)
    return value


def carry_out(
    runtime: ProtocolRuntime,
    train: Callable[[ProtocolTrial], TrialResult],
    progress: Callable[[ProtocolTrial, int], object] | None = None,
) -> Any:
    """Run every trial that a protocol asks for, one after the other; its report.

    Args:
        train: what a trial comes to.
        progress: is called before each trial with how many were done.
    """
    while wave := runtime.ask():
        for trial in wave:
            if progress is not None:
                progress(trial, len(runtime.results))
            result = train(trial)
            runtime.tell(trial, result.loss, curve=result.curve, metrics=result.metrics)
    return runtime.report()
