"""Sides and trials in Optuna's terms."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from modicum.comparison.outcome import Settings
from modicum.comparison.space import Side
from modicum.core.extras import library

PURPOSE = "looking for settings"


def distributions(side: Side) -> dict[str, Any]:
    """The side's ranges as Optuna's; lists by the place of the value."""
    kinds = library("optuna", "tuning", PURPOSE).distributions
    found = {}
    for name, one in side.dimensions.items():
        if one.values:
            found[name] = kinds.CategoricalDistribution(range(len(one.values)))
        elif one.integer:
            found[name] = kinds.IntDistribution(one.low, one.high, log=one.log and one.low >= 1)
        else:
            found[name] = kinds.FloatDistribution(one.low, one.high, log=one.log)
    return found


def frozen_trial(
    side: Side,
    settings: Settings,
    score: float | None,
    attributes: Mapping[str, Any] | None = None,
) -> Any:
    """A finished trial as Optuna's; without a score it is a failed one."""
    optuna = library("optuna", "tuning", PURPOSE)
    params = {
        name: one.values.index(settings[name]) if one.values else settings[name]
        for name, one in side.dimensions.items()
    }
    states = optuna.trial.TrialState
    return optuna.trial.create_trial(
        state=states.FAIL if score is None else states.COMPLETE,
        params=params,
        distributions=distributions(side),
        value=score,
        user_attrs=dict(attributes or {}),
    )


@contextmanager
def silent(optuna: Any) -> Iterator[None]:
    """Optuna reports every study, and warns of what is still experimental."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        optuna.logging.set_verbosity(before)
