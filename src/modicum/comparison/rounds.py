"""The rounds of tuning: all sides in step, batch by batch, with as many trials each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from modicum.comparison.comparison import TrialRow
from modicum.comparison.journal import SearchJournal
from modicum.comparison.outcome import Outcome, Trial
from modicum.comparison.records import Job, TrialRecords
from modicum.comparison.space import Side
from modicum.comparison.tuning import SearchSampler, SideTuning
from modicum.comparison.workers import run_jobs
from modicum.core.progress import Listener

CONFIRMING = 1000
"""From a study's seed on, the seeds that repeat leading settings; those that judge lie before."""
TrialPlace = tuple[str, int]
"""A side, and the number of its trial in this part."""


@dataclass(frozen=True)
class Rules:
    """How sides are tuned, the same for all; see `Study`."""

    trials: int
    sampler: SearchSampler
    seed: int
    batch: int
    more: int
    widenings: int

    @property
    def confirmation(self) -> tuple[int, int]:
        """How many leading settings are repeated, and how often: in a third of the trials.

        The least of twelve single losses is low by luck in part, and other luck on each side would
        be taken for a difference between them. With fewer than six trials there is no place for it.
        """
        third = self.trials // 3
        repetitions = 2 if third >= 4 else 1
        leaders = third // repetitions
        return (leaders, repetitions) if leaders >= 2 else (0, 0)


@dataclass
class TrialRuns:
    """Runs trials that have no record yet, and keeps the rows of those that were asked for."""

    trial: Trial
    records: TrialRecords
    parallel: int
    executor: Executor | None
    report: Listener
    rows: dict[str, TrialRow] = field(default_factory=dict)

    def outcomes(self, jobs: Mapping[TrialPlace, Job], of: int) -> dict[TrialPlace, Outcome]:
        """What these trials came to; those with a record are not run again.

        Args:
            of: how many there will be on each side, for those who watch.
        """
        places = {job.name: place for place, job in jobs.items()}

        def done(job: Job, outcome: Outcome, known: bool = False) -> None:
            if not known:
                self.records.keep(job, outcome)
            event = {"event": "trial", **job.to_json(), "number": places[job.name][1], "of": of}
            self.report(event | {"known": known, "outcome": outcome.to_json()})

        left, found = [], {}
        for job in jobs.values():
            outcome = self.records.outcome(job)
            if outcome is None:
                left.append(job)
            else:
                done(job, outcome, known=True)
        run_jobs(self.trial, left, done, parallel=self.parallel, executor=self.executor)
        for place, job in jobs.items():
            outcome = self.records.outcome(job)
            assert outcome is not None
            found[place] = outcome
            self.rows[job.name] = TrialRow(job, place[1], outcome)
        return found


def tuned(
    sides: Sequence[Side], runs: TrialRuns, rules: Rules, journal: SearchJournal | None
) -> list[SideTuning]:
    """Every side's search, after the rounds that its own edges and the others' ask for.

    A best value at a range's edge widens the range, and gives every side as many trials more.
    """
    searches = [SideTuning(side, rules.sampler, rules.seed, rules.batch) for side in sides]
    leaders, repetitions = rules.confirmation
    target = rules.trials - leaders * repetitions
    for round_ in range(rules.widenings + 1):
        while _wave(searches, runs, rules.seed, target):
            if journal is not None:
                journal.update(searches)
        edges = [search.edges() for search in searches]
        if not any(edges) or round_ == rules.widenings:
            break
        target += rules.more
        for search, found in zip(searches, edges, strict=True):
            search.begin_round(found)
            for name in found:
                event = {"event": "widened", "side": search.side.name, "parameter": name}
                runs.report(event | search.side.dimensions[name].to_json() | {"trials": target})
    _confirm(searches, runs, rules)
    return searches


def _confirm(searches: Sequence[SideTuning], runs: TrialRuns, rules: Rules) -> None:
    """Repeat each side's leading settings from other seeds, the same on all sides."""
    leaders, repetitions = rules.confirmation
    jobs = {}
    for search in searches:
        repeated = [(n, i) for i in range(repetitions) for n in search.leaders(leaders)]
        for place, (number, repetition) in enumerate(repeated, len(search.tried)):
            settings = {**search.side.fixed, **search.tried[number].settings}
            seed = rules.seed + CONFIRMING + repetition
            jobs[search.side.name, place] = Job(search.side.name, settings, seed, "tune")
    outcomes = runs.outcomes(jobs, rules.trials)
    for search in searches:
        numbers = search.leaders(leaders)
        for place, number in enumerate(numbers * repetitions, len(search.tried)):
            search.repeated.setdefault(number, []).append(outcomes[search.side.name, place])


def _wave(searches: Sequence[SideTuning], runs: TrialRuns, seed: int, target: int) -> bool:
    """The next batch of every side; False where no side has one."""
    asked = [
        (one, one.ask()[: target - len(one.tried)]) for one in searches if len(one.tried) < target
    ]
    jobs = {
        (search.side.name, number): Job(
            search.side.name, {**search.side.fixed, **settings}, seed, "tune"
        )
        for search, batch in asked
        for number, settings in enumerate(batch, len(search.tried))
    }
    outcomes = runs.outcomes(jobs, target)
    for search, batch in asked:
        for settings in batch:
            search.tell(settings, outcomes[search.side.name, len(search.tried)])
    return bool(jobs)
