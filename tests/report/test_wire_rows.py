"""What a run sent, in figures and drawn: next to the plan, and out of files that are damaged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modicum.report import summary, write
from modicum.report.call_plot import call_plot


def call(kind: str, sent: int, begun: float, label: str = "layers.1") -> dict[str, Any]:
    return {"kind": kind, "group": "0", "ranks": 2, "label": label, "bytes": sent,
            "asked": begun - 0.01, "begun": begun, "ended": begun + 0.1,
            "waited": 0.05}  # fmt: skip


def update(step: int, *calls: dict[str, Any]) -> dict[str, Any]:
    so_far = {"updates": step, "calls": 3 * step, "bytes": 1016 * step, "waited": 0.15 * step}
    return {"step": step, "seconds": 0.5, "every": 1, "calls": list(calls), "left_out": 0,
            "so_far": so_far}  # fmt: skip


def updates(count: int = 3) -> list[dict[str, Any]]:
    return [
        update(
            step,
            call("all-reduce", 600, 0.1),
            call("all-reduce", 400, 0.15, "head"),
            call("all-reduce", 16, 0.3, "agreement"),
        )
        for step in range(1, count + 1)
    ]


def with_wire(folder: Path, rows: list[Any], wire: list[dict[str, Any]] | None) -> Path:
    lines = [json.loads(line) for line in (folder / "plan.jsonl").read_text().splitlines()]
    if wire is not None:
        for line in lines:
            line["prediction"]["wire"] = wire
    (folder / "plan.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    (folder / "wire.jsonl").write_text(text)
    return folder


PLANNED = [{"collective": "all_reduce", "axis": "replicate", "bytes": 1000, "calls": 2},
           {"collective": "all_gather", "axis": "shard", "bytes": 7, "calls": 1}]  # fmt: skip


def test_an_update_is_next_to_its_plan(make_run: Callable[..., Path]) -> None:
    found = summary(with_wire(make_run(), updates(), PLANNED))["wire"]
    assert found["updates"] == 3
    assert found["bytes"] == 3048
    reduced, gathered = found["rows"]
    assert (reduced["predicted_bytes"], reduced["bytes"]) == (1000, 1000)
    assert (reduced["predicted_calls"], reduced["calls"]) == (2, 2)
    assert abs(reduced["waited"] - 0.1) < 1e-9
    assert (gathered["collective"], gathered["bytes"]) == ("all-gather", 0)
    assert (found["agreement"]["bytes"], found["agreement"]["calls"]) == (16, 1)


def test_the_page_draws_the_last_update(make_run: Callable[..., Path]) -> None:
    page = write(with_wire(make_run(), updates(), PLANNED)).read_text()
    assert "What travelled" in page
    drawn = re.findall(r'<svg class="plot calls".*?</svg>', page)
    assert len(drawn) == 1
    assert drawn[0].count("<rect") == 6
    assert "all-reduce of head: 400 B" in drawn[0]


def test_runs_without_the_file_or_of_an_earlier_version_say_nothing(
    make_run: Callable[..., Path],
) -> None:
    folder = make_run()
    assert summary(folder)["wire"] is None
    assert "What travelled" not in write(folder).read_text()
    found = summary(with_wire(folder, updates(), None))["wire"]
    assert found["rows"][0]["predicted_bytes"] is None


def test_damaged_rows_are_no_stack_trace(make_run: Callable[..., Path]) -> None:
    bad: list[Any] = [
        "{not json\n",
        {"step": 1, "calls": 3},
        {"step": 2, "calls": [{"kind": 7, "bytes": "x", "begun": None}, 4, {"begun": 1e400}]},
        {"step": 3, "calls": [{"label": "</svg><script>", "begun": 0.0, "ended": "x"}]},
        '{"step": 4, "seco',
    ]
    folder = with_wire(make_run(), bad, PLANNED)
    page = write(folder).read_text()
    assert "</svg><script>" not in page
    assert summary(folder)["wire"]["bytes"] is None


def test_calls_at_once_have_lanes_and_one_after_another_share_one() -> None:
    def tops(*begun: float) -> list[str]:
        drawn = call_plot(update(1, *(call("all-gather", 8, instant) for instant in begun)))
        return re.findall(r'<rect x="[\d.]+" y="(\d+)"', drawn)[::2]

    assert tops(0.0, 0.2) == ["0", "0"]
    assert tops(0.0, 0.05, 0.12) == ["0", "20", "0"]
    assert call_plot(update(1)) == ""


def test_where_the_rank_changes_a_note_says_what_the_plan_counts(
    make_run: Callable[..., Path],
) -> None:
    folder = make_run()
    before = summary(folder)["notes"]
    recipe = (folder / "recipe.yaml").read_text()
    for rank, said in (("4", []), ("[2, 4, 3]", ["comm.rank goes from 2 to 4 in 3 updates: "])):
        text = f"{recipe}comm:\n  method: acp_sgd\n  rank: {rank}\n"
        (folder / "recipe.yaml").write_text(text)
        assert summary(folder)["notes"] == before  # nothing was sent yet
        found = summary(with_wire(folder, updates(), PLANNED))["notes"][len(before) :]
        assert [note.partition("what")[0] for note in found] == said
        (folder / "wire.jsonl").unlink()
