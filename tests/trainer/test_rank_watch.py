"""Runs whose ranks are watched: killed, stopped, late, refused, and calm."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from tests.trainer.test_ranks import outcome, recipe_of, rows, trains

from modicum.cli.train import Asked, _run
from modicum.core.contracts.strategy import Strategy
from modicum.core.errors import InputError, ModicumError
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.roll_call import SILENT_SECONDS
from modicum.parallel.rank_environment import RankPlace
from modicum.recipe import Recipe
from modicum.report.events import events
from modicum.report.folder import read
from modicum.trainer import continued, rank_agreement, train
from modicum.trainer.rank_watch import AnomalyReader, watched_run, watched_start

C4 = {"method": "c4", "silent_seconds": 3.0, "late_seconds": 1.0, "slow_share": 0.9}


def faulty(
    ranks: Ranks, values: dict[str, Any], folder: Path, what: str, step: int
) -> tuple[str, list[dict[str, Any]]]:
    """Train as a rank, of which rank 1 does something after a step. How it ended, what was told."""
    heard: list[dict[str, Any]] = []

    def listener(told: dict[str, Any]) -> None:
        if told["event"] == "anomaly":
            heard.append(told)
        if ranks.rank == 1 and told["event"] == "step" and told["step"] == step:
            if what == "late":
                time.sleep(3.0)
            elif what == "fails":
                raise RuntimeError("no such row")
            else:
                os.kill(os.getpid(), signal.SIGKILL if what == "killed" else signal.SIGSTOP)

    try:
        plan = continued(Recipe(**values), folder, ranks=ranks)
        train(plan, folder, ranks=ranks, listener=listener)
    except ModicumError as error:
        return f"{error.exit_code}: {error}", heard
    except RuntimeError as error:
        return f"1: {error}", heard
    return "done", heard


def late_to_a_norm(ranks: Ranks, values: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Train as a rank, of which rank 1 sleeps before the norm of its ninth gradients."""
    heard, before, numbers = list[dict[str, Any]](), Strategy.norm, count(1)

    def norm(strategy: Strategy, parameters: Any) -> Any:
        if ranks.rank == 1 and next(numbers) == 9:
            time.sleep(3.0)
        return before(strategy, parameters)

    def listener(told: dict[str, Any]) -> None:
        if told["event"] == "anomaly":
            heard.append(told)

    Strategy.norm = norm  # type: ignore[method-assign]
    try:
        plan = continued(Recipe(**values), folder, ranks=ranks)
        train(plan, folder, ranks=ranks, listener=listener)
    finally:
        Strategy.norm = before  # type: ignore[method-assign]
    return heard


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


def slowly_agreed(ranks: Ranks, values: dict[str, Any]) -> str:
    """Rank 0 reads its files for longer than a silent rank is waited for."""
    before = rank_agreement.code

    def slow() -> str:
        time.sleep((SILENT_SECONDS + 1.5) * ranks.first)
        return before()

    rank_agreement.code = slow
    try:
        rank_agreement.same_setup(Recipe(**values), ranks, just_met=True)
    except ModicumError as error:
        return str(error)
    finally:
        rank_agreement.code = before
    return "agreed"


@pytest.mark.ranks
@pytest.mark.expensive
def test_a_rank_that_reads_its_files_slowly_is_waited_for(pool: Pool, questions: Path) -> None:
    assert pool.run(slowly_agreed, recipe_of(questions), ranks=2) == ["agreed"] * 2


def ended_record(folder: Path) -> dict[str, Any]:
    """The record once it says that the run ended: who watches writes it after the ranks' end."""
    until = time.monotonic() + 10
    while (kept := record(folder))["status"] == "running" and time.monotonic() < until:
        time.sleep(0.1)
    return kept


@pytest.mark.ranks
@pytest.mark.expensive
def test_a_killed_rank_is_named_and_the_run_resumes_to_the_bit(
    pool: Pool, questions: Path, tmp_path: Path
) -> None:
    values = recipe_of(questions)
    assert pool.run(trains, values, tmp_path / "calm", ranks=2) == ["done"] * 2
    values["watchdog"] = C4
    folder = tmp_path / "run"
    told, _ = pool.run(faulty, values, folder, "killed", 6, ranks=2, lost=(0, 1))
    kept = ended_record(folder)
    assert (kept["status"], kept["failed_by"]) == ("interrupted", "PeerLost")
    assert kept["error"].startswith("rank 1 (host ")
    assert " is dead since 0 s" in kept["error"]
    if told is not None:  # else the watch ended it before gloo had noticed, with exit code 4
        said, heard = told
        assert said.endswith("the same command resumes from the last checkpoint")
        assert heard == []
        assert kept["error"] == said.removeprefix("4: ")  # rank 0 has said it, and not who watches
    assert [row["kind"] for row in rows(folder, "anomalies")] == ["dead"]
    values["watchdog"] = None  # another watchdog, or none, is no other run
    assert pool.run(trains, values, folder, ranks=2) == ["done"] * 2
    assert outcome(folder) == outcome(tmp_path / "calm")
    assert (record(folder)["interruptions"], record(folder)["error"]) == (1, None)


@pytest.mark.ranks
@pytest.mark.expensive
def test_a_stopped_rank_ends_the_run_and_its_record_says_who(
    pool: Pool, questions: Path, tmp_path: Path
) -> None:
    values, folder = recipe_of(questions, watchdog=C4), tmp_path / "run"
    pool.run(faulty, values, folder, "stopped", 6, ranks=2, lost=(0, 1))
    kept = ended_record(folder)
    assert (kept["status"], kept["failed_by"], kept["interruptions"]) == (
        "interrupted", "PeerLost", 1,
    )  # fmt: skip
    assert kept["error"].startswith("rank 1 (host ")
    assert " is stopped since 3 s, and has not entered all-reduce " in kept["error"]
    assert [row["ends"] for row in rows(folder, "anomalies")] == [False, True]
    assert pool.run(trains, values, folder, ranks=2) == ["done"] * 2
    assert record(folder)["interruptions"] == 1


@pytest.mark.ranks
@pytest.mark.expensive
def test_a_late_rank_is_an_event_and_a_mark_in_the_report(
    pool: Pool, questions: Path, tmp_path: Path
) -> None:
    values, folder = recipe_of(questions, watchdog=C4), tmp_path / "run"
    (said, heard), (other, none) = pool.run(faulty, values, folder, "late", 8, ranks=2)
    assert (said, other, none) == ("done", "done", [])
    (event,) = heard
    assert (event["kind"], event["rank"], event["ends"]) == ("late", 1, False)
    assert "it is in test_rank_watch.py:" in event["message"]
    assert 8 <= event["step"] <= 10
    (kept,) = record(folder)["anomalies"]
    assert (kept["step"], kept["sentence"]) == (event["step"], event["message"])
    marks = [each for each in events(read(folder)) if each["kind"] == "anomaly"]
    assert marks == [{"step": event["step"], "kind": "anomaly", "text": event["message"]}]


@pytest.mark.ranks
@pytest.mark.expensive
@pytest.mark.parametrize("strategy", ["fsdp", "zero"])
def test_a_rank_that_is_late_to_a_norm_of_sharded_gradients_is_named(
    pool: Pool, questions: Path, tmp_path: Path, strategy: str
) -> None:
    parallel = {"strategy": strategy}
    values, folder = recipe_of(questions, watchdog=C4, parallel=parallel), tmp_path / "run"
    heard, others = pool.run(late_to_a_norm, values, folder)
    assert others == []
    (event,) = heard
    assert (event["kind"], event["rank"], event["ends"]) == ("late", 1, False)
    assert " of agreement; it is in test_rank_watch.py:" in event["message"]


@pytest.mark.ranks
@pytest.mark.expensive
def test_a_rank_that_fails_is_the_cause(pool: Pool, questions: Path, tmp_path: Path) -> None:
    values, folder = recipe_of(questions, watchdog=C4), tmp_path / "run"
    pool.run(faulty, values, folder, "fails", 6, ranks=2, lost=(0,))
    kept = record(folder)
    assert kept["status"] == "interrupted"
    assert "rank 1 (host " in kept["error"]
    assert "has failed" in kept["error"]
    assert "(RuntimeError: no such row)" in kept["error"]


def planned(
    ranks: Ranks, values: dict[str, Any], folder: Path, what: str
) -> tuple[str, bool, list[Any]]:
    """Watch from the start, and plan; rank 1 does something before. How it ended, who watched."""
    recipe, seen = Recipe(**values), list[Any]()
    if ranks.rank and what == "differs":
        recipe = recipe.changed(watchdog=None)
    try:
        with watched_start(recipe, folder, ranks) as watched:
            if ranks.rank and what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            plan = continued(recipe, folder, ranks=ranks)
            with watched_run(plan, folder, ranks) as again:
                seen.append(again is watched)
    except ModicumError as error:
        return f"{error.exit_code}: {error}", False, seen
    return "done", watched._closed.is_set(), seen


@pytest.mark.ranks
@pytest.mark.expensive
def test_ranks_watch_each_other_from_before_the_plan(
    pool: Pool, questions: Path, tmp_path: Path
) -> None:
    values, folder = recipe_of(questions, watchdog=C4), tmp_path / "run"
    assert pool.run(planned, values, folder, "", ranks=2) == [("done", True, [True])] * 2
    for said, _, seen in pool.run(planned, values, folder, "differs", ranks=2):
        assert said.startswith("2: rank 1 has another setup than rank 0: recipe.watchdog")
        assert seen == []
    (said, _, _), _ = pool.run(planned, values, folder, "killed", ranks=2, lost=(1,))
    assert said.startswith("4: rank 1 (host ")
    assert " is dead since 0 s" in said
    assert said.count("the same command resumes") == 1
    assert not folder.exists()


def test_rows_are_read_once_and_complete(tmp_path: Path) -> None:
    file = tmp_path / "anomalies.jsonl"
    assert AnomalyReader().new() == AnomalyReader(tmp_path).new() == []
    file.write_text('{"old": 1}\n')
    reader = AnomalyReader(tmp_path)
    assert reader.new() == []
    with file.open("a") as more:
        more.write('{"a": 1}\nno json\n7\n{"b"')
    assert reader.new() == [{"a": 1}]
    assert reader.new() == []
    with file.open("a") as more:
        more.write(": 2}\n")
    assert reader.new() == [{"b": 2}]


@pytest.mark.parametrize(
    ("ranks", "said", "watches"),
    [(1, {}, None), (2, {}, "c4"), (2, {"watchdog": None}, None), (2, {"watchdog": C4}, C4)],
)
def test_the_command_watches_several_ranks_unless_the_recipe_says_null(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: int, said: Any, watches: Any
) -> None:
    seen: list[Any] = []

    def planned(recipe: Recipe, *_: Any, **__: Any) -> None:
        seen.append(recipe.watchdog)
        raise InputError("that is all")

    monkeypatch.setattr("modicum.core.ranks.ranks.joined", lambda *_: nullcontext(Ranks()))
    monkeypatch.setattr("modicum.trainer.continued", planned)
    asked = Asked("recipe.yaml", out=tmp_path / "run")
    with pytest.raises(InputError, match="that is all"):
        _run(Recipe(**said), asked, RankPlace(0, ranks), restart=False)
    assert seen == [{"method": "c4"} if watches == "c4" else watches]
