"""What a study found, as plain values: every trial, the settings, who is better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from modicum.comparison.judgement import StudyJudgement, judged
from modicum.comparison.luck import Selection
from modicum.comparison.outcome import Outcome
from modicum.comparison.records import Job
from modicum.comparison.study_file import FORMAT
from modicum.comparison.tuning import SideTuning


@dataclass(frozen=True)
class TrialRow:
    """A trial in the report.

    Args:
        number: of tuning, from 0 on, or the place of the seed among those that judge.
    """

    job: Job
    number: int
    outcome: Outcome

    def to_json(self) -> dict[str, Any]:
        """One flat row."""
        return {**self.job.to_json(), "number": self.number, **self.outcome.to_json()}


@dataclass(frozen=True)
class SideResult:
    """What became of one side.

    Args:
        frozen: the settings that were judged, fixed ones included; None where no trial finished.
        tuned: the loss by which they were chosen.
        number: the trial that had it.
        tried: how many settings were.
        defaults: the loss of the first trial.
        curves: of each parameter, (value, loss, status) of all trials, by value where it is a
            number.
        notes: ranges that were widened, and those whose edge is still best.
        problem: why it was not judged.
    """

    name: str
    frozen: Mapping[str, Any] | None
    tuned: float | None = None
    number: int | None = None
    tried: int = 0
    defaults: float | None = None
    curves: Mapping[str, Sequence[tuple[Any, float | None, str]]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    problem: str = ""


@dataclass(frozen=True)
class Comparison:
    """A study's result.

    Args:
        identity: what was compared: sides, ranges, sampler, seeds, and what the caller gave.
        judgement: on validation data, from fresh seeds.
        tests: the same on each test loss, which no choice has looked at.
        data: of each seed the hash of the tokens, and whether it is the same on all sides.
        frozen_before: settings that were frozen, and perhaps judged, before there were more trials.
    """

    identity: Mapping[str, Any]
    sides: Sequence[SideResult]
    trials: Sequence[TrialRow]
    judgement: StudyJudgement
    tests: Mapping[str, StudyJudgement]
    data: Mapping[int, Mapping[str, Any]]
    frozen_before: Sequence[Mapping[str, Any]] = ()

    @property
    def winner(self) -> str | None:
        """The side that is shown to be better than every other on validation data."""
        return self.judgement.winner

    @property
    def taken(self) -> int:
        """How many trials another study trained alike, so that they were not trained here."""
        return sum(row.outcome.taken for row in self.trials)

    def side(self, name: str) -> SideResult:
        """The side of this name."""
        return next(side for side in self.sides if side.name == name)

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values, as in `compare.json`."""
        return {
            "format": FORMAT,
            "identity": dict(self.identity),
            "winner": self.winner,
            "taken": self.taken,
            "judgement": self.judgement.to_json(),
            "tests": {name: one.to_json() for name, one in self.tests.items()},
            "sides": [asdict(side) for side in self.sides],
            "data": {str(seed): dict(found) for seed, found in self.data.items()},
            "frozen_before": [dict(one) for one in self.frozen_before],
            "trials": [row.to_json() for row in self.trials],
        }


def side_result(tuning: SideTuning, fixed: Mapping[str, Any]) -> SideResult:
    """What tuning a side came to."""
    chosen, tried = tuning.chosen, tuning.tried
    notes = list(tuning.notes)
    notes += [
        f"{name} is best at its edge {end:g}, beyond which nothing was tried"
        for name, end in _last_edges(tuning).items()
    ]
    if tuning.exhausted:
        notes.append(f"all {len(tried)} settings were tried")
    problem = ""
    if chosen is None:
        last = next((one.outcome for one in tried if one.outcome.message), None)
        why = f": {last.status.replace('_', ' ')}, {last.message}" if last else ""
        problem = f"none of {len(tried)} trials finished{why}"
    curves = {}
    for name in tuning.side.space:
        points = [(one.settings[name], one.outcome.loss, one.outcome.status) for one in tried]
        numeric = not tuning.side.dimensions[name].values
        curves[name] = sorted(points, key=lambda point: point[0]) if numeric else points
    return SideResult(
        tuning.side.name,
        None if chosen is None else {**fixed, **tried[chosen].settings},
        None if chosen is None else tuning.score(chosen),
        chosen,
        len(tried),
        tried[0].outcome.loss if tried else None,
        curves,
        notes,
        problem,
    )


def _last_edges(tuning: SideTuning) -> Mapping[str, float]:
    if tuning.best is None:
        return {}
    settings = [one.settings for one in tuning.tried]
    return tuning.side.edges(settings[tuning.best], settings)


def judgements(
    outcomes: Mapping[str, Mapping[int, Outcome]],
    selections: Mapping[str, Selection],
    baseline: str | None,
    seed: int,
) -> tuple[StudyJudgement, dict[str, StudyJudgement]]:
    """The judgement on validation data, and on each test loss that every side has."""
    names = [
        name
        for by_seed in outcomes.values()
        for outcome in by_seed.values()
        for name in outcome.test
    ]
    tests = {
        name: judged(outcomes, selections, figure=name, baseline=baseline, seed=seed)
        for name in dict.fromkeys(names)
    }
    return judged(outcomes, selections, baseline=baseline, seed=seed), tests


def same_data(outcomes: Mapping[str, Mapping[int, Outcome]]) -> dict[int, dict[str, Any]]:
    """Of each seed the hash of the tokens in order, and whether it is one on all sides."""
    seeds = sorted({seed for by_seed in outcomes.values() for seed in by_seed})
    found = {}
    for seed in seeds:
        hashes = {
            side: by_seed[seed].data_hash
            for side, by_seed in outcomes.items()
            if seed in by_seed and by_seed[seed].data_hash
        }
        different = sorted(set(hashes.values()))
        found[seed] = {
            "hash": different[0] if len(different) == 1 else None,
            "same": len(different) <= 1,
            "hashes": hashes,
        }
    return found
