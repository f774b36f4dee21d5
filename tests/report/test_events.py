"""What the charts mark: everything that happened at a step, in order, whatever the files hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modicum.report.columns import StepColumns
from modicum.report.events import events
from modicum.report.folder import FolderContents


def run(
    path: Path = Path("x"), plans: list[Any] | None = None, rows: Any = (), **record: Any
) -> FolderContents:
    return FolderContents(path, run=record, plans=plans or [], metrics=StepColumns(rows))


def found(contents: FolderContents) -> list[tuple[int, str]]:
    return [(event["step"], event["kind"]) for event in events(contents)]


def test_every_kind_has_a_mark_in_the_order_of_the_steps(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000040").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".step-00000050").mkdir()  # is being written
    contents = run(
        tmp_path,
        plans=[
            {},
            {"surgery": {"step": 10, "why": "ranks"}},
            {"ended": {"step": 20, "why": "slow"}},
        ],
        rows=[{"step": 5, "loss": None, "skipped": True}, {"step": 6, "loss": 1.0}],
        best={"step": 30},
        stopped_early=45,
        resumed_after=[15, 25],
        environments=[
            {"after_step": 0, "ranks": 1, "torch": "2.13"},
            {"after_step": 25, "ranks": 2, "torch": "2.13"},
        ],
    )
    assert found(contents) == [
        (5, "skipped"), (10, "surgery"), (15, "resumed"), (20, "ended"), (25, "resumed"),
        (25, "elsewhere"), (30, "best"), (40, "checkpoint"), (45, "stopped"),
    ]  # fmt: skip
    texts = [event["text"] for event in events(contents)]
    assert "from here on another ranks" in texts
    assert "layers changed: ranks" in texts


def test_what_is_no_step_has_no_mark() -> None:
    assert found(run(resumed_after="x", environments=[3, {}], best=[], stopped_early="no")) == []
    assert found(run(resumed_after=[None, "3", 7.0], environments={"a": 1})) == [(7, "resumed")]
    same = [{"after_step": 0, "ranks": 1}, {"after_step": 9, "ranks": 1}]
    assert found(run(environments=same)) == []
