"""Which of several methods is better on one's data, by how much, at the same cost.

It knows a `Trial` alone: a function of a side, its settings and a seed that says what training came
to. Sides are tuned with as many trials each, their settings frozen, and judged from fresh seeds.
"""

from __future__ import annotations

from modicum.comparison.cache import SharedTrials
from modicum.comparison.comparison import Comparison, SideResult, TrialRow
from modicum.comparison.judgement import PairedDifference, StudyJudgement, judged
from modicum.comparison.outcome import Outcome, Settings, Trial, TrialPart, trial_name
from modicum.comparison.ranges import OneOf, TrialRange
from modicum.comparison.space import Searchable, Side
from modicum.comparison.standing import Standing
from modicum.comparison.study import Study

__all__ = [
    "Comparison",
    "OneOf",
    "Outcome",
    "PairedDifference",
    "Searchable",
    "Settings",
    "SharedTrials",
    "Side",
    "SideResult",
    "Standing",
    "Study",
    "StudyJudgement",
    "Trial",
    "TrialPart",
    "TrialRange",
    "TrialRow",
    "judged",
    "trial_name",
]
