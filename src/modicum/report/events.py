"""What happened at known steps of a run, for the marks on its charts and for a table."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from modicum.report.folder import FolderContents, listing, section
from modicum.report.numbers import as_count, number

_MOST = 100  # marks of one kind: of more, the first ones
_CHECKPOINT = re.compile(r"step-(\d{1,15})")


def events(run: FolderContents) -> list[dict[str, Any]]:
    """Marks in order of their steps: `step`, `kind`, and `text` in words.

    Kinds are skipped (an update that had no finite loss or gradient), surgery, ended (a
    method, for good), resumed, elsewhere (from here on by another machine, version or number of
    ranks), best, stopped, checkpoint (one that is kept) and anomaly (a rank held up the others).
    """
    found = [
        *_skipped(run), *_plans(run), *_starts(run), *_checkpoints(run), *_anomalies(run)
    ]  # fmt: skip
    best = section(run.run, "best")
    if (step := number(best.get("step"))) is not None:
        found.append(_event(step, "best", "best evaluation"))
    if (step := number(run.run.get("stopped_early"))) is not None:
        found.append(_event(step, "stopped", "stopped early: evaluations no longer improved"))
    return sorted(found, key=lambda event: event["step"])


def _event(step: float, kind: str, text: str) -> dict[str, Any]:
    return {"step": as_count(step), "kind": kind, "text": text}


def _skipped(run: FolderContents) -> list[dict[str, Any]]:
    places = run.metrics.points("skipped")[0][:_MOST]
    text = "no finite loss or gradient: the update was skipped"
    return [_event(run.metrics.steps[place], "skipped", text) for place in places]


def _plans(run: FolderContents) -> list[dict[str, Any]]:
    found = []
    for plan in run.plans[:_MOST]:
        surgery = section(plan, "surgery")
        if (step := number(surgery.get("step"))) is not None:
            found.append(_event(step, "surgery", f"layers changed: {surgery.get('why', '')}"))
        ended = section(plan, "ended")
        if (step := number(ended.get("step"))) is not None:
            found.append(_event(step, "ended", f"a method has ended: {ended.get('why', '')}"))
    return found


def _starts(run: FolderContents) -> list[dict[str, Any]]:
    steps = run.run.get("resumed_after")
    found = [
        _event(step, "resumed", "resumed from the checkpoint of this step")
        for each in (steps if isinstance(steps, list) else ())[:_MOST]
        if (step := number(each)) is not None
    ]
    places = listing(run.run, "environments")[:_MOST]
    for before, place in pairwise(places):
        names = [name for name in place if name != "after_step" and place[name] != before.get(name)]
        if (step := number(place.get("after_step"))) is not None and names:
            said = ", ".join(name.replace("_", " ") for name in names)
            found.append(_event(step, "elsewhere", f"from here on another {said}"))
    return found


def _anomalies(run: FolderContents) -> list[dict[str, Any]]:
    return [
        _event(step, "anomaly", str(row.get("sentence", "")))
        for row in listing(run.run, "anomalies")[-_MOST:]
        if (step := number(row.get("step"))) is not None
    ]


def _checkpoints(run: FolderContents) -> list[dict[str, Any]]:
    folder = run.path / "checkpoints"
    try:
        names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    except OSError:
        return []
    steps = [int(match[1]) for name in names if (match := _CHECKPOINT.fullmatch(name))]
    return [_event(step, "checkpoint", "checkpoint that is kept") for step in steps[-_MOST:]]
