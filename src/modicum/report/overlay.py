"""Everything that the page of several runs shows: their figures, recipes and texts side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modicum.report import facts as told
from modicum.report.folder import FolderContents
from modicum.report.recipes import differing
from modicum.report.samples import samples
from modicum.report.subject import subject
from modicum.report.time_rows import side_by_side
from modicum.report.view import data_lines

# Where a run stands rather than what it did: no difference of recipes.
_PLACES = ("tracking.name",)


def overlay(runs: Sequence[FolderContents]) -> dict[str, Any]:
    """What the template of several runs shows."""
    facts = [told.facts(run) for run in runs]
    differences = differing([run.recipe for run in runs])
    return {
        "runs": [
            {
                "name": name,
                "facts": result,
                "subject": subject(run.recipe, run.run.get("directory")),
                "peak": result["peak_bytes"][told.counted(run)],
                "data": data_lines(result),
            }
            for name, run, result in zip(names(runs), runs, facts, strict=True)
        ],
        "differences": [row for row in differences if row[0] not in _PLACES],
        "time": side_by_side([run.run for run in runs]),
        "samples": last_samples(runs),
    }


def names(runs: Sequence[FolderContents]) -> list[str]:
    """What each run is called on the page."""
    return distinct([run.name for run in runs], [str(run.path) for run in runs])


def distinct(given: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Names that differ: a name that two runs share becomes the path of each.

    >>> distinct(["a", "b", "a"], ["x/a", "b", "y/a"])
    ['x/a', 'b', 'y/a']
    """
    return [
        path if given.count(name) > 1 else name for name, path in zip(given, paths, strict=True)
    ]


def last_samples(runs: Sequence[FolderContents]) -> list[dict[str, Any]]:
    """For each prompt what each run wrote last."""
    found: dict[str, list[dict[str, Any]]] = {}
    for place, (run, name) in enumerate(zip(runs, names(runs), strict=True)):
        for sample in samples(run.samples):
            piece = sample["pieces"][-1] | {"run": name, "place": place}
            found.setdefault(sample["prompt"], []).append(piece)
    return [{"prompt": prompt, "pieces": pieces} for prompt, pieces in found.items()]
