"""`modicum plan` with --why, --compare, --machine and --picture."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from modicum.cli.planning import print_why
from modicum.planner.choose import with_headroom


def test_why_a_field_is_what_it_is(modicum: Any, runs: Any) -> None:
    chosen = modicum("plan", runs.recipe, "--why", "training.micro_batch_size")
    assert chosen.code == 0, chosen.err
    assert chosen.out.startswith("training.micro_batch_size: 2, by the planner: ")
    assert "this one" in chosen.out
    written = modicum("plan", runs.recipe, "--why", "training.batch_size").out
    assert f"by you: written in {runs.recipe}:3" in written
    override = modicum("plan", runs.recipe, "--set", "training.seed=3", "--why", "training.seed")
    assert "training.seed: 3, by you: written in --set training.seed=3" in override.out
    default = modicum("plan", runs.recipe, "--why", "training.seed", "--json")
    assert json.loads(default.out)["by"] == "default"
    wrong = modicum("plan", runs.recipe, "--why", "training.sed")
    assert (wrong.code, wrong.err.count("\n")) == (2, 1)
    assert "training.seed" in wrong.err


def test_a_remark_is_printed_below_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"field": "optimizer.rank", "value": 9, "by": "you", "why": "written in r.yaml:3"}
    print_why({**row, "note": "rank 8 fits all"})
    said = "optimizer.rank: 9, by you: written in r.yaml:3\nnote: rank 8 fits all\n"
    assert capsys.readouterr().out == said


def test_why_a_run_has_so_many_steps_names_where_its_tokens_are_written(
    modicum: Any, runs: Any
) -> None:
    changes = ("--set", "training.steps=null", "--set", "training.tokens=3k")
    shown = modicum("plan", runs.recipe, *changes, "--why", "training.steps")
    assert shown.code == 0, shown.err
    assert "by you: training.tokens 3,000, " in shown.out
    assert "written in --set training.tokens=3k" in shown.out
    planned = modicum("plan", runs.recipe, *changes, "--set", "training.warmup_tokens=1k")
    assert "training.warmup_tokens 1,000, " in planned.out
    images = ("--set", "task={method: images}", "--set", "training.warmup_tokens=1k")
    refused = modicum("plan", runs.recipe, *images)
    assert refused.code == 2
    assert "training.warmup_tokens" in refused.err


def test_why_a_choice_is_made_by_the_room_that_the_plan_has(
    modicum: Any, runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown = itertools.count(300_000_000, 40_000_000)  # each look at the process finds it larger
    monkeypatch.setattr("modicum.planner.choose.resident_bytes", lambda: next(grown))
    planned = json.loads(modicum("plan", runs.recipe, "--json").out)
    grown = itertools.count(300_000_000, 40_000_000)
    why = ("--why", "training.micro_batch_size")
    row = json.loads(modicum("plan", runs.recipe, *why, "--json").out)
    [taken] = [each for each in row["candidates"] if each["chosen"]]
    predicted = planned["prediction"]
    needed = with_headroom(predicted["process_bytes"], predicted["process_base"])
    assert taken["needs_bytes"] == pytest.approx(needed, rel=1e-3)
    assert next(grown) == 340_000_000


def test_two_recipes_next_to_each_other(modicum: Any, runs: Any, tmp_path: Path) -> None:
    other = tmp_path / "wider.yaml"
    other.write_text(runs.recipe.read_text().replace("width: 16", "width: 32"))
    shown = modicum("plan", "--compare", runs.recipe, other)
    assert shown.code == 0, shown.err
    assert "model.width: 16 -> 32" in shown.out
    assert "keeps its budget" in shown.out
    found = json.loads(modicum("plan", "--compare", runs.recipe, other, "--json").out)
    less, more = found["costs"]["peak_bytes"]
    assert less < more
    both = modicum("plan", runs.recipe, "--compare", other, "--why", "training.seed")
    assert (both.code, both.err.count("\n")) == (2, 1)


def test_a_plan_for_another_machine_says_that_it_was_not_measured(
    modicum: Any, runs: Any, tmp_path: Path
) -> None:
    shown = modicum("plan", runs.recipe, "--machine", "rtx4090")
    assert shown.code == 0, shown.err
    assert "not measured: the vendor" in shown.out
    bench = tmp_path / "bench.json"
    bench.write_text(modicum("bench", "machine", "--json").out)
    mine = modicum("plan", runs.recipe, "--machine", bench, "--json")
    assert mine.code == 0, mine.err
    assert json.loads(mine.out)["machine"]["measured"] is True
    bench.write_text("name: mine\ndevice: cpu\n")
    wrong = modicum("plan", runs.recipe, "--machine", bench)
    assert (wrong.code, wrong.err.count("\n")) == (2, 1)
    assert "memory" in wrong.err
    unknown = modicum("plan", runs.recipe, "--machine", "h100")
    assert unknown.code == 2
    assert "h100-80g" in unknown.err
    missing = modicum("plan", runs.recipe, "--machine", tmp_path / "none.yaml")
    assert (missing.code, missing.err.count("\n")) == (2, 1)


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_a_picture_of_a_step_s_memory(modicum: Any, runs: Any, tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"memory.{kind}"
    made = modicum("plan", runs.recipe, "--picture", file)
    assert made.code == 0, made.err
    assert str(file) in made.err
    begin = {"svg": b"<?xml", "png": b"\x89PNG"}[kind]
    assert file.read_bytes().startswith(begin)
    wrong = modicum("plan", runs.recipe, "--picture", tmp_path / "memory.gif")
    assert (wrong.code, wrong.err.count("\n")) == (2, 1)
    why = modicum("plan", runs.recipe, "--picture", file, "--why", "training.seed")
    assert why.code == 2


def test_a_picture_is_of_one_plan(modicum: Any, runs: Any, tmp_path: Path) -> None:
    file = tmp_path / "memory.svg"
    for more in (("--why", "training.steps"), ("--compare", runs.recipe)):
        ended = modicum("plan", runs.recipe, "--picture", file, *more)
        assert ended.code == 2
        assert "leave --why and --compare out" in ended.err


def test_room_is_shown_with_what_to_set(modicum: Any, runs: Any) -> None:
    shown = modicum("plan", runs.recipe, "--set", "training.recompute=blocks").out
    assert "There is room for" in shown
    assert "--set training.recompute=none  " in shown  # in one line, to be copied
    assert "training.recompute=none" in shown
