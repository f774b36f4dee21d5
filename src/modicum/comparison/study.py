"""A comparison from its first trial to its verdict, which may be killed at any time.

    sides ─▶ tune each, same number of trials ─▶ freeze ─▶ judge from fresh seeds ─▶ compare.json
             trials/*.json, one a trial          study.json

What is done next follows from the arguments and the outcomes in `trials/` alone. So the same
call on the same folder ends with the same result, and no finished trial runs twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from modicum.comparison.comparison import (
    Comparison,
    SideResult,
    judgements,
    same_data,
    side_result,
)
from modicum.comparison.identity import as_json, checked_sides
from modicum.comparison.journal import SearchJournal
from modicum.comparison.outcome import Outcome, Status, Trial
from modicum.comparison.records import Job, TrialRecords
from modicum.comparison.rounds import CONFIRMING, Rules, TrialRuns, tuned
from modicum.comparison.space import Side
from modicum.comparison.study_file import StudyFile
from modicum.comparison.tuning import SearchSampler, SideTuning, check_sampler
from modicum.core.errors import InputError, Interrupted
from modicum.core.files import write_json
from modicum.core.folder_lock import locked_folder
from modicum.core.progress import Listener

RESULT = "compare.json"


class Study:
    """Sides that are tuned alike and judged from fresh seeds.

    Args:
        folder: where everything is kept; a study that is there is resumed.
        sides: two or more that differ. One with a `refusal` is reported, not tried; for which
            reason is no part of what is compared.
        trial: trains; it is all that the study knows of training.
        trials: of tuning on each side, its defaults first; a third of them repeats the leading
            settings from other seeds. May grow on a folder that is there.
        seeds: that judge, fewer than 1000. May grow.
        sampler: `tpe`, `random` or `grid`.
        seed: of the samplers, and of the trials that tune; those that judge have the ones after it,
            repetitions the ones from 1000 after it on.
        baseline: the side that others are compared with; None: the best one.
        parallel: trials at once, each in a thread.
        executor: where they run instead.
        batch: trials that are asked for at once, whatever `parallel` is.
        more: trials that each side gets in addition when a range is widened; None: a third of
            `trials`, `batch` at least.
        widenings: how often that may be.
        given: what else decides the outcomes (recipe, budget, data), as JSON values: another is
            another study.
        journal: whether Optuna's own journal of the searches is kept for its dashboards.

    Raises:
        InputError: fewer than two sides, two that are the same, no trials, no seeds.

    >>> import math, tempfile
    >>> from modicum.comparison import Outcome, Side, TrialRange, Study
    >>> space = {"rate": TrialRange(1e-4, 1e-1, default=1e-2)}
    >>> def trial(side, settings, seed, part):
    ...     miss = abs(settings["rate"] - 0.003) + 0.001 * math.sin(seed * len(side))
    ...     return Outcome("finished", miss + {"adamw": 2.0, "lion": 1.9}[side])
    >>> sides = [Side("adamw", space, {"beta": 0.9}), Side("lion", space, {"beta": 0.95})]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = Study(folder, sides, trial, trials=5, sampler="grid").run()
    >>> found.winner, found.side("lion").frozen
    ('lion', {'beta': 0.95, 'rate': 0.003162})
    """

    def __init__(
        self,
        folder: str | Path,
        sides: Sequence[Side],
        trial: Trial,
        *,
        trials: int = 12,
        seeds: int = 5,
        sampler: SearchSampler = "tpe",
        seed: int = 0,
        baseline: str | None = None,
        parallel: int = 1,
        executor: Executor | None = None,
        batch: int = 4,
        more: int | None = None,
        widenings: int = 3,
        given: Mapping[str, Any] | None = None,
        journal: bool = True,
    ) -> None:
        for name, value in (("trials", trials), ("seeds", seeds), ("parallel", parallel),
                            ("batch", batch), ("more", 1 if more is None else more)):  # fmt: skip
            if value < 1:
                raise InputError("one at least", field=name, value=value, allowed="1 or more")
        if seeds >= CONFIRMING:
            raise InputError(
                "too many", field="seeds", value=seeds, allowed=f"1 to {CONFIRMING - 1}"
            )
        check_sampler(sampler)
        self.sides = checked_sides(sides)
        taking_part = [side.name for side in self.sides if not side.refusal]
        if baseline is not None and baseline not in taking_part:
            raise InputError(
                "no such side takes part", field="baseline", value=baseline, candidates=taking_part
            )
        self.folder, self.trial = Path(folder), trial
        self.baseline, self.parallel, self.executor = baseline, parallel, executor
        further = more if more is not None else max(batch, trials // 3)
        self.rules = Rules(trials, sampler, seed, batch, further, widenings)
        self.judge_seeds = range(seed + 1, seed + 1 + seeds)
        self.identity = as_json(
            {
                "sides": {side.name: side.to_json() for side in self.sides},
                "sampler": sampler,
                "seed": seed,
                "baseline": baseline,
                "batch": batch,
                "more": more,
                "widenings": widenings,
                "given": dict(given or {}),
            }
        )
        self._file = StudyFile(self.folder)
        self._journal = SearchJournal(self.folder) if journal else None

    def run(self, progress: Listener | None = None, *, retry: bool = False) -> Comparison:
        """Do what is left, and write `compare.json`.

        Args:
            progress: called with events: `begun`, `trial`, `widened`, `frozen`, `judged`,
                `damaged`.
            retry: run trials anew that crashed, ran out of memory or were refused.

        Raises:
            InputError: the folder holds another study, is in use, or cannot be written.
            Interrupted: it was stopped; the same call resumes.
        """
        report = progress or _silence
        with locked_folder(self.folder, "comparison"):
            runs = self._begin(report, retry)
            with _interruptible(runs):
                taking_part = [side for side in self.sides if not side.refusal]
                searches = tuned(taking_part, runs, self.rules, self._journal)
                results = [_result(side, searches) for side in self.sides]
                frozen_before = self._file.freeze(
                    {one.name: one.frozen for one in results if one.frozen is not None}
                )
                report({"event": "frozen", "before": len(frozen_before)})
                outcomes = self._judge(results, runs)
                selections = {one.side.name: one.selection for one in searches}
                judgement, tests = judgements(outcomes, selections, self.baseline, self.rules.seed)
                comparison = Comparison(
                    self.identity | self._lengths,
                    results,
                    list(runs.rows.values()),
                    judgement,
                    tests,
                    same_data(outcomes),
                    frozen_before,
                )
                write_json(self.folder / RESULT, comparison.to_json())
                report({"event": "judged", "judgement": judgement.to_json()})
                return comparison

    def _begin(self, report: Listener, retry: bool) -> TrialRuns:
        """Take over what is there, or begin.

        Raises:
            InputError: what is there is of another study.
        """
        refused = {side.name: side.refusal for side in self.sides if side.refusal}
        if self._file.begin(self.identity, self._lengths, refused):
            report({"event": "damaged", "file": str(self._file.path)})
        # A refusal may be of the moment too: no room, no network, a folder that takes no files.
        again: tuple[Status, ...] = ("crashed", "out_of_memory", "refused") if retry else ()
        records = TrialRecords(self.folder)
        records.read(but=again)
        for damaged in records.damaged:
            report({"event": "damaged", "file": str(damaged)})
        names = [side.name for side in self.sides]
        report({"event": "begun", "sides": names, **self._lengths, "known": len(records)})
        return TrialRuns(self.trial, records, self.parallel, self.executor, report)

    @property
    def _lengths(self) -> dict[str, int]:
        """What may grow."""
        return {"trials": self.rules.trials, "seeds": len(self.judge_seeds)}

    def _judge(
        self, results: Sequence[SideResult], runs: TrialRuns
    ) -> dict[str, dict[int, Outcome]]:
        """Each side's outcomes by seed; none of a side without settings."""
        jobs = {
            (one.name, number): Job(one.name, one.frozen, seed, "judge")
            for number, seed in enumerate(self.judge_seeds)
            for one in results
            if one.frozen is not None
        }
        found = runs.outcomes(jobs, len(self.judge_seeds))
        return {
            one.name: {
                seed: found[one.name, number]
                for number, seed in enumerate(self.judge_seeds)
                if (one.name, number) in found
            }
            for one in results
        }


@contextmanager
def _interruptible(runs: TrialRuns) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(
            f"stopped with {len(runs.records)} finished trials; the same command resumes"
        ) from None


def _result(side: Side, searches: Sequence[SideTuning]) -> SideResult:
    for search in searches:
        if search.side.name == side.name:
            return side_result(search, side.fixed)
    return SideResult(side.name, None, problem=side.refusal)


def _silence(event: dict[str, Any]) -> None:
    """What listens where nobody does."""
