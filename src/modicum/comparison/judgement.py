"""Which side is better, by differences that are paired by seed, and how sure that is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, Literal

from modicum.comparison.luck import Selection
from modicum.comparison.outcome import Outcome
from modicum.comparison.standing import Standing, standing
from modicum.core.intervals import (
    LEVEL,
    MeanInterval,
    bootstrap_interval,
    holm,
    p_value,
    t_interval,
)

SideVerdict = Literal["better", "worse", "no difference shown", "not judged"]
FEW = 5  # seeds below which an interval hangs on its normal distribution
FEW_SEEDS = f"fewer than {FEW} seeds"
_NO_MEAN = "no mean is claimed"


@dataclass(frozen=True)
class PairedDifference:
    """A side less the one that it is compared with: negative where its losses are less.

    Args:
        interval: of the mean at 95 %, by Student's t over the seeds and the luck of tuning.
        seed_interval: the same of these settings: over the seeds alone.
        bootstrap: of the seeds too, by percentiles of 10,000 resamples of the differences.
        luck: the standard deviation that the luck of tuning gives the mean.
        p: of the t test that the mean is zero; `adjusted_p` is Holm's.
        verdict: of the side, by `adjusted_p`.
    """

    side: str
    against: str
    differences: tuple[float, ...] = ()
    mean: float | None = None
    interval: MeanInterval | None = None
    seed_interval: MeanInterval | None = None
    bootstrap: MeanInterval | None = None
    luck: float = 0.0
    p: float | None = None
    adjusted_p: float | None = None
    verdict: SideVerdict = "not judged"
    reason: str = ""


@dataclass(frozen=True)
class StudyJudgement:
    """The sides on one figure.

    Args:
        figure: `loss` on validation data, or a test loss's name.
        reference: what every other side is compared with: the baseline, or the least mean.
        winner: the side that is better than every other, where there is one.
    """

    figure: str
    seeds: tuple[int, ...]
    reference: str | None
    standings: tuple[Standing, ...]
    differences: tuple[PairedDifference, ...]
    winner: str | None

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values; a loss of +inf is the text `diverged`."""
        found = asdict(self)
        for row in found["standings"]:
            row["losses"] = ["diverged" if loss == math.inf else loss for loss in row["losses"]]
        return found


def judged(
    outcomes: Mapping[str, Mapping[int, Outcome]],
    selections: Mapping[str, Selection] | None = None,
    *,
    figure: str = "loss",
    baseline: str | None = None,
    seed: int = 0,
) -> StudyJudgement:
    """Compare sides by the outcomes of the same seeds.

    A side with a seed that diverged, failed or is missing has no mean and no difference: what is
    left of it would be chosen by how it came out.

    Args:
        outcomes: of each side, by seed.
        selections: what each side's settings were chosen from; a side without one was not tuned.
        figure: `loss`, or the name of a test loss.
        baseline: the side that others are compared with. Without one it is that of the least mean,
            and Holm's correction is over all pairs, since the losses chose which are looked at.
        seed: of the bootstrap.

    Raises:
        InputError: SciPy, which the extra `tuning` brings, is not installed.

    Source: Holm 1979, "A simple sequentially rejective multiple test procedure".

    >>> runs = {"a": [1.0, 1.1, 1.2, 1.0, 1.1], "b": [1.5, 1.7, 1.6, 1.6, 1.6]}
    >>> found = judged(
    ...     {s: {i: Outcome("finished", x) for i, x in enumerate(v)} for s, v in runs.items()}
    ... )
    >>> found.reference, [(one.side, one.verdict) for one in found.differences]
    ('a', [('b', 'worse')])
    """
    seeds = sorted({one for by_seed in outcomes.values() for one in by_seed})
    standings = [standing(side, outcomes[side], seeds, figure) for side in outcomes]
    sound = {one.side: one for one in standings if one.mean is not None}
    reference = baseline
    if baseline is None and sound:
        reference = min(sound, key=lambda side: sound[side].mean or 0.0)
    differences = []
    if reference is not None:
        pairs: Iterable[tuple[str, str]] = combinations(sound, 2)
        if baseline is not None:
            pairs = [(side, baseline) for side in sound if side != baseline and baseline in sound]
        luck = {
            frozenset(pair): _luck(_paired(sound, *pair), pair, selections or {}, seed)
            for pair in pairs
        }
        tests = {
            pair: p_value(_paired(sound, *sorted(pair)), variance)
            for pair, variance in luck.items()
        }
        adjusted = dict(zip(tests, holm(list(tests.values())), strict=True))
        for side in outcomes:
            if side != reference:
                pair = frozenset((side, reference))
                found = (adjusted.get(pair), luck.get(pair, 0.0))
                differences.append(_difference(standings, sound, side, reference, *found, seed))
    winner = _winner([one for one in differences if outcomes[one.side]])
    return StudyJudgement(
        figure, tuple(seeds), reference, tuple(standings), tuple(differences), winner
    )


def _paired(sound: Mapping[str, Standing], side: str, against: str) -> list[float]:
    pairs = zip(sound[side].losses, sound[against].losses, strict=True)
    return [one - other for one, other in pairs if one is not None and other is not None]


def _luck(
    differences: Sequence[float],
    pair: Iterable[str],
    selections: Mapping[str, Selection],
    seed: int,
) -> float:
    """The variance that both sides' tuning gives their difference.

    The deviation of one training is that of the differences, over the root of two.
    """
    if len(differences) < 2:
        return 0.0
    deviation = statistics.stdev(differences) / math.sqrt(2)
    return sum(selections[side].variance(deviation, seed) for side in pair if side in selections)


def _difference(
    standings: Sequence[Standing],
    sound: Mapping[str, Standing],
    side: str,
    against: str,
    adjusted: float | None,
    luck: float,
    seed: int,
) -> PairedDifference:
    problems = [
        f"{one.side} {one.problem}"
        for one in standings
        if one.problem and one.side in (side, against)
    ]
    if problems:
        return PairedDifference(side, against, reason=f"{'; '.join(problems)}: {_NO_MEAN}")
    differences = _paired(sound, side, against)
    mean, verdict, reason = statistics.fmean(differences), "no difference shown", ""
    interval, of_seeds = t_interval(differences, variance=luck), t_interval(differences)
    if adjusted is None:
        verdict, reason = "not judged", "one seed has no interval"
    elif adjusted < 1 - LEVEL:
        verdict = "better" if mean < 0 else "worse"
    elif interval is not None and not interval[0] <= 0 <= interval[1]:
        reason = "the interval alone leaves zero out, but not for as many sides as there are (Holm)"
    elif of_seeds is not None and not of_seeds[0] <= 0 <= of_seeds[1]:
        reason = "so much may be luck of tuning; more trials would make it less"
    if adjusted is not None and len(differences) < FEW:
        reason = f"{reason + '; ' if reason else ''}{FEW_SEEDS}"
    return PairedDifference(
        side,
        against,
        tuple(differences),
        mean,
        interval,
        of_seeds,
        bootstrap_interval(differences, seed=seed),
        math.sqrt(luck),
        p_value(differences, luck),
        adjusted,
        verdict,  # type: ignore[arg-type]
        reason,
    )


def _winner(differences: Sequence[PairedDifference]) -> str | None:
    """The side that is shown to be better than every other one that was run."""
    if not differences:
        return None
    if all(one.verdict == "worse" for one in differences):
        return differences[0].against
    better = [one for one in differences if one.verdict == "better"]
    return better[0].side if len(differences) == 1 and better else None
