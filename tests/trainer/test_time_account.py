"""Where a run's time went: each row has what was spent in it, and they sum to the run's seconds.

The clock of these runs stands still but for what a test lets it move, and a nanosecond a look.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pool import Pool
from tests.trainer.conftest import full, rows, run

from modicum.checkpoint import CheckpointStore
from modicum.core.clock import (
    AGAIN,
    BACKWARD,
    BUILDING,
    CHECKPOINT,
    DATA,
    EVALUATING,
    EXPORT,
    FORWARD,
    LOST,
    PREPARING,
    SAMPLING,
    TRACKING,
    TRIALS,
    UNEXPLAINED,
    UPDATE,
    WAITING,
    WIRE,
    Clock,
)  # fmt: skip
from modicum.core.contracts.strategy import Strategy
from modicum.core.errors import Interrupted
from modicum.core.ranks.collectives import Collectives
from modicum.core.ranks.ranks import Ranks
from modicum.parallel.replicated import FlatBucket
from modicum.recipe import Recipe
from modicum.tasks.causal_lm import CausalLM
from modicum.trainer import continued, evaluate, session, setup, train
from modicum.trainer.time_account import Waits, carried, over_ranks, rows_of


class Hand:
    """A clock's hand: it moves by a nanosecond when it is read, and as a test moves it."""

    def __init__(self) -> None:
        self.at = 0

    def __call__(self) -> int:
        self.at += 1
        return self.at

    def before(
        self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, seconds: float
    ) -> None:
        """Let a function take so long."""
        function = getattr(owner, name)

        def slow(*args: Any, **options: Any) -> Any:
            self.at += round(seconds * 1e9)
            return function(*args, **options)

        monkeypatch.setattr(owner, name, slow)


def spent(folder: Path) -> dict[str, float]:
    """The rows of a run, whose sum is checked, without what looking at the clock took."""
    content = json.loads((folder / "run.json").read_text())
    assert math.fsum(content["time"]["rows"].values()) == pytest.approx(content["seconds"])
    assert content["time"]["rows"].get(UNEXPLAINED, 0.0) < 1e-3
    return {row: round(value, 2) for row, value in content["time"]["rows"].items() if value > 0.01}


SLOW = {
    DATA: (session, "counted", 0.5, 4),
    FORWARD: (CausalLM, "outputs", 0.25, 8),
    BACKWARD: (torch.Tensor, "backward", 0.125, 8),
    UPDATE: (Strategy, "update", 1.0, 4),
    EVALUATING: (evaluate, "micro_batches", 2.0, 3),
    SAMPLING: (CausalLM, "samples", 4.0, 2),
    CHECKPOINT: (CheckpointStore, "save", 3.0, 2),
    PREPARING: (CausalLM, "prepare", 5.0, 1),
    BUILDING: (setup, "assemble", 6.0, 1),
    EXPORT: (CausalLM, "export", 7.0, 1),
}
"""Row: what is made slow, by how many seconds, and how often it happens in the run below."""


def test_what_takes_long_is_found_in_its_own_row(dataset, tmp_path, monkeypatch):
    hand, values = Hand(), full(dataset, training={"steps": 4}, evaluation={"every": 2})
    values["checkpoint"] = {"every": 2, "asynchronous": False}
    for owner, name, seconds, _ in SLOW.values():
        hand.before(monkeypatch, owner, name, seconds)

    def listener(event: dict[str, Any]) -> None:
        hand.at += 10**8 if event["event"] == "step" else 0

    run(values, tmp_path / "run", ranks=Ranks(clock=Clock(hand)), listener=listener)
    found = spent(tmp_path / "run")
    assert found.pop(TRIALS) > 0  # passes that nothing is learned from
    expected = {row: round(seconds * times, 2) for row, (_, _, seconds, times) in SLOW.items()}
    expected[EVALUATING] += 3 * 2 * 0.25  # forward passes of evaluations, two in each
    assert found == {**expected, TRACKING: 0.4}
    steps = rows(tmp_path / "run")
    assert [round(row["data_seconds"], 3) for row in steps] == [0.5] * 4
    elapsed = [row["elapsed"] for row in steps]
    assert elapsed == sorted(elapsed)


@pytest.fixture
def interrupted(dataset, tmp_path, monkeypatch):
    """A run whose updates take a second each, as a kill leaves it after step 7 of 10.

    Checkpoints are of every fifth step; a copy of the folder is what a kill leaves.
    """
    hand, values = Hand(), full(dataset, training={"steps": 10}, evaluation={"every": 100})
    values["checkpoint"] = {"every": 5, "asynchronous": False}
    hand.before(monkeypatch, Strategy, "update", 1.0)
    hand.before(monkeypatch, setup, "assemble", 20.0)

    def listener(event: dict[str, Any]) -> None:
        if (event["event"], event.get("step")) == ("step", 7):
            shutil.copytree(tmp_path / "first", tmp_path / "killed")

    run(values, tmp_path / "first", ranks=Ranks(clock=Clock(hand)), listener=listener)
    return values, tmp_path / "killed", hand


def test_steps_done_again_and_the_start_after_a_kill_are_lost_work(interrupted):
    values, folder, hand = interrupted
    run(values, folder, ranks=Ranks(clock=Clock(hand)))
    found = spent(folder)
    assert found == {BUILDING: 20.0, UPDATE: 10.0, LOST: 2.0, AGAIN: 20.0}
    again = rows(folder)[7]
    # The eighth step comes after 20 + 7 of the first start, and 20 + 3 of this one.
    assert again["elapsed"] == pytest.approx(50.0, abs=0.01)


def test_after_a_stop_that_saves_only_the_start_is_repeated(dataset, tmp_path, monkeypatch):
    hand, values = Hand(), full(dataset, training={"steps": 10}, evaluation={"every": 100})
    hand.before(monkeypatch, Strategy, "update", 1.0)
    hand.before(monkeypatch, setup, "assemble", 20.0)

    def listener(event: dict[str, Any]) -> None:
        if (event["event"], event.get("step")) == ("step", 7):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        run(values, tmp_path / "run", ranks=Ranks(clock=Clock(hand)), listener=listener)
    run(values, tmp_path / "run", ranks=Ranks(clock=Clock(hand)))
    assert spent(tmp_path / "run") == {BUILDING: 20.0, UPDATE: 10.0, AGAIN: 20.0}


def test_more_steps_of_a_finished_run_lose_nothing(interrupted, tmp_path):
    values, _, hand = interrupted
    values["training"] = values["training"] | {"steps": 12}
    run(values, tmp_path / "first", ranks=Ranks(clock=Clock(hand)))
    assert spent(tmp_path / "first") == {BUILDING: 40.0, UPDATE: 12.0}


def test_a_run_of_an_earlier_version_is_unexplained(interrupted):
    values, folder, hand = interrupted
    content = json.loads((folder / "run.json").read_text())
    del content["time"]
    (folder / "run.json").write_text(json.dumps(content | {"seconds": 99.0}))
    shutil.rmtree(folder / "checkpoints")
    (folder / "metrics.jsonl").unlink()
    run(values, folder, ranks=Ranks(clock=Clock(hand)))
    found = json.loads((folder / "run.json").read_text())["time"]["rows"]
    assert found[UNEXPLAINED] == pytest.approx(99.0, abs=0.01)


ROWS = st.dictionaries(st.sampled_from([DATA, FORWARD, LOST, UNEXPLAINED]), st.floats(0.01, 1e6))


@given(ROWS, ROWS, st.lists(st.floats(0, 1e6)), st.integers(0, 4))
def test_what_is_carried_sums_to_the_last_that_is_known(written, saved, elapsed, step):
    """It loses no second, and what is not lost was there."""
    record, notes = (
        {"seconds": math.fsum(rows.values()), "time": {"rows": rows}} for rows in (written, saved)
    )
    metrics = [{"step": n, "elapsed": value} for n, value in enumerate(elapsed, 1)]
    found = carried(record, notes, metrics, step)
    last = max([record["seconds"], notes["seconds"], *elapsed])
    assert math.fsum(found.values()) == pytest.approx(last, abs=1e-5)
    kept = saved if len(metrics) > step or notes["seconds"] > record["seconds"] else written
    assert all(found[row] == kept[row] for row in kept if row != LOST)


@pytest.mark.parametrize("damaged", [None, [], {"rows": []}, {"rows": {"data": "x", "wire": -1}}])
def test_a_damaged_record_has_its_seconds_all_the_same(damaged):
    assert rows_of({"seconds": 3.0, "time": damaged}) == {UNEXPLAINED: 3.0}


def test_rows_over_ranks():
    ranks = [{WIRE: 1.0, DATA: 2.0}, {WIRE: 5.0}, {WIRE: 2.0, DATA: 1.0}]
    assert over_ranks(ranks) == {
        WIRE: {"median": 2.0, "most": 5.0, "rank": 1},
        DATA: {"median": 1.0, "most": 2.0, "rank": 0},
    }


# Several ranks


def holds(ranks: Ranks, seconds: list[list[float]]) -> dict[str, float]:
    """Be held in exchanges for so long, agreement by agreement; the rows."""
    hand = Hand()
    ranks.clock = Clock(hand)
    waits = Waits(ranks)
    for of_ranks in seconds:
        with ranks.clock(WIRE):
            hand.at += round(of_ranks[ranks.rank] * 1e9)
        waits.settle()
    return {row: round(value, 3) for row, value in ranks.clock.rows().items()}


@pytest.mark.ranks
def test_the_last_to_come_waits_for_nobody(pool: Pool):
    # The wire takes 1 s and then 2; rank 1 comes 3 s late, then rank 0 comes 4 s late.
    first, second = pool.run(holds, [[4.0, 1.0], [2.0, 6.0]], ranks=2)
    assert (first[WIRE], first[WAITING]) == (3.0, 3.0)
    assert (second[WIRE], second[WAITING]) == (3.0, 4.0)


def wired(ranks: Ranks, values: dict[str, Any], folder: Path) -> dict[str, float]:
    """Train where each exchange of gradients takes a second; the rows of this rank."""
    hand = Hand()
    ranks.clock = Clock(hand)
    with pytest.MonkeyPatch.context() as patched:
        hand.before(patched, FlatBucket, "land", 1.0)
        hand.before(patched, Collectives, "reduce_scatter", 1.0)
        found: dict[str, float] = {}

        def listener(event: dict[str, Any]) -> None:
            if event["event"] == "step":
                found.update(ranks.clock.rows())

        train(
            continued(Recipe(**values), folder, ranks=ranks), folder, ranks=ranks, listener=listener
        )
    return {row: round(value) for row, value in found.items() if value > 0.5}


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_exchanges_of_gradients_are_on_the_wire(pool: Pool, dataset, tmp_path, strategy):
    values = full(dataset, training={"steps": 3}, parallel={"strategy": strategy})
    for rows_of_rank in pool.run(wired, values, tmp_path / "run", ranks=2):
        assert list(rows_of_rank) == [WIRE]
        assert rows_of_rank[WIRE] >= 3
    content = json.loads((tmp_path / "run" / "run.json").read_text())
    assert content["time"]["ranks"][WIRE]["median"] >= 3
    assert math.fsum(content["time"]["rows"].values()) == pytest.approx(content["seconds"])
