"""The third part of the data: trained on by nobody, and looked at once, in full."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from tests.trainer.conftest import full, losses, outcome, rows, run
from tests.trainer.test_ranks import DDP, FSDP, recipe_of, trains
from tests.trainer.test_streamed_runs import streamed, written

import modicum
from modicum.core.errors import InputError, Interrupted
from modicum.core.progress import Listener
from modicum.data.sampler import Sampler
from modicum.data.sources import open_source
from modicum.data.text_rows import TextRows
from modicum.data.tokenizer import Tokenizer
from modicum.models.huggingface import load
from modicum.trainer import evaluate_run
from modicum.trainer.evaluate import evaluate

PARTS = {"test_fraction": 0.2, "validation_fraction": 0.1}


def with_test(dataset: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """The recipe of `full`, with a test that is looked at in the end."""
    evaluation = {"rows": "all", "test": True} | sections.pop("evaluation", {})
    data = PARTS | sections.pop("data", {})
    return full(dataset, data=data, evaluation=evaluation, **sections)


@pytest.fixture(scope="session")
def calm(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process, never interrupted."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    run(with_test(dataset), folder)
    return folder


def record(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return content


def test_the_test_is_the_loss_of_the_exported_model_on_documents_that_nobody_trained(
    calm: Path, dataset: Path
) -> None:
    made = modicum.plan(modicum.Recipe(**with_test(dataset)))
    draw_test = [n for n in range(400) if _part(made, n) == "test"]
    tokenizer, model = Tokenizer.load(calm / "tokenizer"), load(calm / "model").eval()
    texts = [document.text for document in open_source(dataset).documents()]
    total, count = 0.0, 0
    with torch.no_grad():
        for number in draw_test:
            ids = [*tokenizer.encode(texts[number]), tokenizer.eos_id]
            pieces = [ids[start : start + 33] for start in range(0, len(ids) - 1, 32)]
            for piece in pieces:
                logits = model(torch.tensor([piece[:-1]]))[0]
                labels = torch.tensor(piece[1:])
                total += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
                count += len(labels)
    found = record(calm)["final"]["test"]
    assert found["tokens"] == count
    assert found["loss"] == pytest.approx(total / count, rel=1e-4)


def _part(plan: modicum.Plan, number: int) -> str:
    from modicum.tasks.parts import draw_of

    return draw_of(plan.recipe.data, plan.recipe.training.seed).part_of(number)


def test_a_finished_run_is_evaluated_as_it_was_while_it_trained(calm: Path) -> None:
    found = evaluate_run(calm)
    assert found == record(calm)["final"]["test"]
    assert found["step"] == 20
    held = evaluate_run(calm, "validation")
    last = rows(calm, "evaluations.jsonl")[-1]
    assert held.pop("rows") > 8
    assert held == {name: last[name] for name in held}
    assert held["loss"] != found["loss"]


def test_a_metric_that_is_no_number_is_none_in_strict_json(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluates(*given: Any, **named: Any) -> dict[str, Any]:
        strange = {"loss": float("nan"), "perplexity": float("inf"), "by": [{"x": float("-inf")}]}
        return evaluate(*given, **named) | strange

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is in a file")

    monkeypatch.setattr("modicum.trainer.looking.evaluate", evaluates)
    folder, told = tmp_path / "run", list[dict[str, Any]]()
    run(with_test(dataset, training={"steps": 2}), folder, listener=told.append)
    for line in (folder / "evaluations.jsonl").read_text().splitlines():
        row = json.loads(line, parse_constant=refuse)
        assert (row["loss"], row["perplexity"], row["by"]) == (None, None, [{"x": None}])
        assert 0 <= row["token_accuracy"] <= 1
    final = json.loads((folder / "run.json").read_text(), parse_constant=refuse)["final"]
    assert (final["validation_loss"], final["test"]["loss"]) == (None, None)
    seen = [event for event in told if event["event"] in ("evaluation", "test")]
    assert [event["loss"] for event in seen] == [None] * 3


@pytest.mark.expensive
def test_nothing_else_of_a_run_depends_on_the_test(
    calm: Path, dataset: Path, tmp_path: Path
) -> None:
    run(with_test(dataset, evaluation={"test": False}), tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(calm)
    assert "test" not in record(tmp_path / "run")["final"]
    assert evaluate_run(tmp_path / "run") == record(calm)["final"]["test"]


@pytest.mark.expensive
def test_the_weights_of_the_best_evaluation_are_what_is_tested(
    dataset: Path, tmp_path: Path
) -> None:
    worst = {"keep_best": True, "every": 4, "better": "higher"}
    content = run(with_test(dataset, evaluation=worst, training={"steps": 12}), tmp_path / "run")
    found = content["final"]["test"]
    assert found["step"] == content["best"]["step"] == 4
    assert evaluate_run(tmp_path / "run") == found


@pytest.mark.expensive
@pytest.mark.parametrize(("event", "number"), [("step", 8), ("test", 1)])
def test_killed_at_any_moment_the_same_again_tests_the_same(
    dataset: Path, calm: Path, child: Callable[..., Any], tmp_path: Path, event: str, number: int
) -> None:
    values, folder = with_test(dataset), tmp_path / "run"
    assert child(values, folder, event, number).code == -signal.SIGKILL
    assert "test" not in record(folder)["final"]
    run(values, folder)
    assert outcome(folder) == outcome(calm)
    assert record(folder)["final"] == record(calm)["final"]


def test_a_request_to_stop_in_the_test_leaves_it_to_the_same_command(
    dataset: Path, calm: Path, tmp_path: Path
) -> None:
    values, folder = with_test(dataset), tmp_path / "run"
    with pytest.raises(Interrupted):
        run(values, folder, listener=_stopping_at("sample", 2))
    assert "test" not in record(folder)["final"]
    assert run(values, folder)["final"] == record(calm)["final"]


def _stopping_at(name: str, number: int) -> Listener:
    seen: list[str] = []

    def listener(event: dict[str, Any]) -> None:
        seen.append(event["event"])
        if event["event"] == name and seen.count(name) == number:
            os.kill(os.getpid(), signal.SIGTERM)

    return listener


@pytest.mark.ranks
@pytest.mark.parametrize("parallel", [DDP, FSDP])
def test_several_ranks_count_each_row_once(
    pool: Pool, questions: Path, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    values = recipe_of(questions, parallel=parallel)
    values["data"] |= {"test_fraction": 0.2}
    values["evaluation"] |= {"rows": "all", "test": True}
    assert pool.run(trains, values, tmp_path / "run", ranks=2) == ["done"] * 2
    there, here = record(tmp_path / "run")["final"]["test"], evaluate_run(tmp_path / "run")
    assert [there[name] for name in ("rows", "tokens")] == [here[n] for n in ("rows", "tokens")]
    assert there["loss"] == pytest.approx(here["loss"], rel=1e-5)
    assert there["token_accuracy"] == here["token_accuracy"]


@pytest.mark.expensive
def test_the_test_of_a_stream_is_that_of_the_same_data_mapped(
    finished: Path, tmp_path: Path
) -> None:
    data = written(tmp_path / "data.jsonl", 60)
    values = streamed(data, finished, data=PARTS, evaluation={"test": True})
    content = run(values, tmp_path / "streamed")
    values["data"]["streaming"] = False
    mapped = run(values, tmp_path / "mapped")
    assert losses(tmp_path / "streamed") == losses(tmp_path / "mapped")
    one, other = content["final"]["test"], mapped["final"]["test"]
    assert one["tokens"] == other["tokens"]
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert evaluate_run(tmp_path / "streamed") == one


def test_the_test_of_a_stream_is_not_read_before_it_is_asked_for(
    finished: Path, tmp_path: Path
) -> None:
    other = written(tmp_path / "test.jsonl", 9)
    data = {"test_path": str(other)}
    values = streamed(written(tmp_path / "data.jsonl", 60), finished, data=data)
    folder = tmp_path / "run"
    run(values | {"training": values["training"] | {"steps": 2}}, folder)
    found = evaluate_run(folder)
    assert 9 <= found["rows"] < 20


def test_data_that_has_changed_is_not_what_a_run_is_tested_on(
    dataset: Path, tmp_path: Path
) -> None:
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    lines = dataset.read_text().splitlines(keepends=True)
    train.write_text("".join(lines[:60]))
    test.write_text("".join(lines[60:70]))
    data = {"test_fraction": 0.0, "test_path": str(test)}
    run(with_test(train, data=data, training={"steps": 2}), tmp_path / "run")
    assert 10 <= evaluate_run(tmp_path / "run")["rows"] < 20
    test.write_text("".join(lines[60:71]))
    with pytest.raises(InputError, match="data has changed since this run began"):
        evaluate_run(tmp_path / "run")


def test_a_test_that_is_trained_on_is_refused(dataset: Path, tmp_path: Path) -> None:
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    lines = dataset.read_text().splitlines(keepends=True)
    train.write_text("".join(lines[:60]))
    test.write_text("".join(lines[58:70]))
    data = {"test_fraction": 0.0, "test_path": str(test)}
    with pytest.raises(InputError, match=r"\d of its documents are trained on too") as error:
        run(with_test(train, data=data, training={"steps": 2}), tmp_path / "run")
    assert error.value.field == "data.test_path"


def test_a_run_without_a_test_says_so(finished: Path) -> None:
    with pytest.raises(InputError, match="nothing is held out for test"):
        evaluate_run(finished)


def test_what_asks_for_a_test_has_one(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"needs test data: set data\.test_fraction or") as error:
        modicum.Recipe(**full(dataset, evaluation={"test": True}))
    assert error.value.field == "evaluation.test"
    task = {"method": "images", "images": 16, "held_out": 0, "widths": [2]}
    images = modicum.Recipe(task=task, evaluation={"test": True}, training={"steps": 1})
    with pytest.raises(InputError, match="needs test data, and there is none"):
        modicum.train(modicum.plan(images), tmp_path / "run")


@pytest.mark.parametrize("fraction", [0.1, 0.5])
def test_training_takes_rows_of_the_training_alone(
    dataset: Path, tmp_path: Path, fraction: float
) -> None:
    from modicum.core.ranks.ranks import Ranks

    values = with_test(dataset, data={"test_fraction": fraction})
    plan = modicum.plan(modicum.Recipe(**values))
    data = plan.task.prepare(plan.recipe, plan.inputs, tmp_path, lambda *_: None, Ranks())
    assert isinstance(data.sampler, Sampler)
    assert data.sampler.rows == len(data.train)
    parts = [data.train, data.validation, data.test]
    documents = []
    for part in parts:
        assert isinstance(part, TextRows)
        documents.append(part.counts.documents)
    assert sum(documents) == 400
    assert documents[2] == pytest.approx(400 * fraction, rel=0.2)
    assert plan.counts["documents"] == documents[0]


def test_what_a_transform_holds_from_the_start_is_in_the_measured_peak(dataset, tmp_path):
    content = run(full(dataset, transform={"method": "mkor"}), tmp_path / "run")
    plain = run(full(dataset), tmp_path / "plain")
    plan = modicum.plan(modicum.Recipe(**full(dataset, transform={"method": "mkor"})))
    by_what = {entry.what: entry.bytes for entry in plan.prediction.ledger.entries}
    own = by_what["inverse factors"] + by_what["sums of the update"]
    more = content["measured_by_kind"]["optimizer"] - plain["measured_by_kind"]["optimizer"]
    assert more == own > 0
    peak = content["peak_bytes"]
    assert peak["measured"] == pytest.approx(peak["predicted"], rel=0.03)
