"""The best checkpoint and early stopping: which step; the same after a kill and on all ranks."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool import Pool
from tests.trainer.conftest import full, outcome, rows, run

from modicum.checkpoint import CheckpointStore
from modicum.core.errors import InputError, Interrupted
from modicum.core.ranks.ranks import Ranks
from modicum.recipe import Recipe
from modicum.recipe.sections import EvaluationSection
from modicum.trainer import continued, train
from modicum.trainer.best import Best, best_of
from modicum.trainer.evaluate import evaluate

# So high a learning rate that validation soon gets worse.
JUDGED = {"every": 2, "rows": 8, "keep_best": True, "patience": 2}


def evaluations(*values: float | None, **names: Any) -> list[dict[str, Any]]:
    return [{"step": 5 * n, "loss": value, **names} for n, value in enumerate(values)]


def judged(dataset: Path, **evaluation: Any) -> dict[str, Any]:
    """A run that stops early: at this rate its validation loss soon rises."""
    return full(
        dataset,
        training={"steps": 40, "learning_rate": 0.3, "schedule": "constant", "batch_size": 4},
        evaluation=JUDGED | evaluation,
        checkpoint={"every": 3, "keep": 1},
    )


def test_the_first_of_the_best_counts_and_the_one_before_training_does_not() -> None:
    asked = EvaluationSection()
    assert best_of([], asked) == Best()
    assert best_of(evaluations(0.1), asked) == Best()
    assert best_of(evaluations(0.1, 3.0, 2.0, 2.0, None), asked) == Best(10, 2.0, 2)
    assert best_of(evaluations(0.1, None, float("nan")), asked) == Best(None, None, 2)
    higher = EvaluationSection(metric="accuracy")
    seen = [{"step": step, "accuracy": value} for step, value in ((1, 0.1), (2, 0.7), (3, 0.6))]
    assert best_of(seen, higher) == Best(2, 0.7, 1)
    assert best_of(seen, higher, {"accuracy": "lower"}) == Best(1, 0.1, 2)
    lower = EvaluationSection(metric="perplexity")
    assert best_of(evaluations(0.0, 1.0, 2.0, perplexity=3.0), lower).step == 5
    assert best_of(evaluations(0.0, 1.0, 2.0), EvaluationSection(better="higher")).step == 10


def test_patience_counts_what_is_better_by_enough_and_the_best_is_the_best() -> None:
    asked = EvaluationSection(min_delta=0.5)
    assert best_of(evaluations(9.0, 3.0, 2.8, 2.6), asked) == Best(15, 2.6, 2)
    assert best_of(evaluations(9.0, 3.0, 2.8, 2.4), asked) == Best(15, 2.4, 0)


@given(st.lists(st.floats(0, 9), max_size=12), st.integers(0, 12))
def test_what_was_best_is_known_from_any_beginning_of_the_rows(
    values: list[float], count: int
) -> None:
    found = best_of(evaluations(*values)[:count], EvaluationSection())
    seen = values[1:count]
    assert found.value == (min(seen) if seen else None)
    if seen:
        assert found.step == 5 * (1 + seen.index(min(seen)))
        assert found.waited == len(seen) - 1 - seen.index(min(seen))


def test_a_held_checkpoint_stays_until_its_successor_is_in_place(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    for step in (1, 2, 3, 4):
        if step in (1, 3):
            store.hold(step)
        store.save(step, {"model": {}})
        assert store.steps() == {1: [1], 2: [1, 2], 3: [3], 4: [3, 4]}[step]
    later = CheckpointStore(tmp_path, keep=1)
    later.hold(3)
    later.save(5, {"model": {}})
    assert later.steps() == [3, 5]


def test_a_checkpoint_that_is_there_already_is_held_without_the_one_before(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.hold(1)
    store.save(1, {"model": {}})
    store.save(2, {"model": {}})
    store.hold(2)
    assert store.steps() == [1, 2]
    store.save(3, {"model": {}})
    assert store.steps() == [2, 3]


@pytest.mark.parametrize(
    ("evaluation", "said"),
    [
        (
            {"metric": "los"},
            r"evaluation.metric: .*found: 'los'.*allowed: loss, token_accuracy, perplexity",
        ),
        ({"metric": "loss", "keep_best": True}, r"evaluation.keep_best: needs validation data"),
    ],
)
def test_what_nothing_could_decide_is_refused(
    dataset: Path, tmp_path: Path, evaluation: dict[str, Any], said: str
) -> None:
    values = full(dataset, evaluation={"patience": 1} | evaluation)
    if evaluation["metric"] == "loss":
        values["data"]["validation_fraction"] = 0.0
    with pytest.raises(InputError, match=said):
        run(values, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.fixture(scope="module")
def stopped(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stopped early, and was not interrupted."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    run(judged(dataset), folder)
    return folder


@pytest.mark.expensive
def test_a_run_stops_early_and_exports_its_best(
    dataset: Path, stopped: Path, tmp_path: Path
) -> None:
    record = json.loads((stopped / "run.json").read_text())
    seen = [(row["loss"], row["step"]) for row in rows(stopped, "evaluations.jsonl")[1:]]
    assert record["status"] == "finished"
    assert record["best"] == {"step": min(seen)[1], "metric": "loss", "value": min(seen)[0]}
    assert record["stopped_early"] == record["steps"] == record["best"]["step"] + 4 < 40
    steps = CheckpointStore(stopped / "checkpoints").steps()
    assert steps == [record["best"]["step"], record["steps"]]
    # What is exported is what a run exports that ends with the best step.
    values = judged(dataset, keep_best=False, patience=None)
    values["training"] |= {"steps": record["best"]["step"]}
    run(values, tmp_path / "short")
    assert outcome(stopped)["weights"] == outcome(tmp_path / "short")["weights"]
    told: list[dict[str, Any]] = []
    run(judged(dataset), stopped, listener=told.append)
    assert told == []  # it has finished, and is left alone


@pytest.mark.expensive
def test_a_task_s_metric_decides(dataset: Path, stopped: Path, tmp_path: Path) -> None:
    record = run(judged(dataset, metric="token_accuracy"), tmp_path / "run")
    seen = [row["token_accuracy"] for row in rows(tmp_path / "run", "evaluations.jsonl")[1:]]
    assert record["best"]["value"] == max(seen)
    assert 0 < max(seen) < 1
    by_loss = rows(stopped, "evaluations.jsonl")
    assert [row["perplexity"] for row in by_loss] == [math.exp(row["loss"]) for row in by_loss]


@pytest.mark.expensive
@pytest.mark.parametrize(
    "moment", [("evaluation", 3), ("step", 5), ("step", "best"), ("stopping", 1)]
)
def test_interrupted_it_stops_at_the_same_step(
    dataset: Path, stopped: Path, tmp_path: Path, moment: tuple[str, int | str]
) -> None:
    if moment == ("step", "best"):  # the next process is the one that evaluates it
        moment = "step", json.loads((stopped / "run.json").read_text())["best"]["step"]
    seen = []

    def listener(event: dict[str, Any]) -> None:
        seen.append(event["event"])
        if (event["event"], seen.count(event["event"])) == moment:
            os.kill(os.getpid(), signal.SIGTERM)

    values, folder = judged(dataset), tmp_path / "run"
    if moment[0] == "stopping":  # so near the end, it is brought to its end
        run(values, folder, listener=listener)
    else:
        with pytest.raises(Interrupted):
            run(values, folder, listener=listener)
        run(values, folder)
    assert outcome(folder) == outcome(stopped)
    steps = [CheckpointStore(each / "checkpoints").steps() for each in (folder, stopped)]
    assert steps[0] == steps[1]


def test_a_fork_that_only_gets_worse_exports_where_it_began(
    dataset: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    def worse(*given: Any, **named: Any) -> dict[str, Any]:
        seen.append(float(len(seen)))
        return evaluate(*given, **named) | {"loss": seen[-1]}

    monkeypatch.setattr("modicum.trainer.looking.evaluate", worse)
    values = full(
        dataset,
        training={"steps": 40},
        evaluation=JUDGED,
        checkpoint={"every": 1, "keep": 1},
    )
    record = run(values, tmp_path / "fork", fork=finished)
    assert record["best"] == {"step": 20, "metric": "loss", "value": 0.0}
    assert record["stopped_early"] == 24
    assert CheckpointStore(tmp_path / "fork" / "checkpoints").steps() == [20, 24]
    assert outcome(tmp_path / "fork")["weights"] == outcome(finished)["weights"]


def trains(ranks: Ranks, values: dict[str, Any], folder: Path) -> tuple[int, int]:
    """Train as a rank: how many steps it did, and after which it said that it stops."""
    steps, stops = [], []

    def listener(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            steps.append(event["step"])
        elif event["event"] == "stopping":
            stops.append(event["step"])

    train(continued(Recipe(**values), folder, ranks=ranks), folder, ranks=ranks, listener=listener)
    return steps[-1], stops[-1]


@pytest.mark.expensive
@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_stop_at_the_same_step_and_export_the_best(
    pool: Pool, dataset: Path, tmp_path: Path, strategy: str
) -> None:
    values, folder = judged(dataset) | {"parallel": {"strategy": strategy}}, tmp_path / "run"
    one, other = pool.run(trains, values, folder, ranks=2)
    record = json.loads((folder / "run.json").read_text())
    assert one == other == (record["steps"], record["stopped_early"])
    assert record["best"]["step"] == record["steps"] - 4
    values["training"] |= {"steps": record["best"]["step"]}
    values["evaluation"] |= {"keep_best": False, "patience": None}
    pool.run(short, values, tmp_path / "short", ranks=2)
    assert outcome(folder)["weights"] == outcome(tmp_path / "short")["weights"]


def short(ranks: Ranks, values: dict[str, Any], folder: Path) -> None:
    train(continued(Recipe(**values), folder, ranks=ranks), folder, ranks=ranks)
