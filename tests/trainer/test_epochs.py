"""Runs whose length is given in epochs."""

from __future__ import annotations

import json
import math

import pytest
from tests.trainer.conftest import full, lora, losses, rows, run

import modicum
from modicum.core.errors import InputError


def by_epochs(values, epochs):
    training = {key: value for key, value in values["training"].items() if key != "steps"}
    return values | {"training": training | {"epochs": epochs}}


@pytest.fixture(scope="module")
def two_epochs(dataset, finished, tmp_path_factory):
    """Of an adaptation, whose tokenizer is known: the recipe's values and the run folder."""
    folder = tmp_path_factory.mktemp("epochs") / "run"
    values = by_epochs(lora(finished, dataset, checkpoint={"every": 4}), 0.5)
    run(values, folder)
    return values, folder


def test_epochs_are_as_many_steps_as_rows_need(two_epochs, dataset, finished, tmp_path):
    values, folder = two_epochs
    plan = modicum.plan(modicum.Recipe(**values))
    content = json.loads((folder / "run.json").read_text())
    assert plan.counts["exact"]
    assert plan.counts["rows"] == content["data"]["rows"]
    steps = math.ceil(0.5 * plan.counts["rows"] / 8)
    assert plan.steps == content["steps"] == content["steps_planned"] == steps
    assert plan.row()["epochs"] == pytest.approx(steps * 8 / plan.counts["rows"])
    in_steps = lora(finished, dataset, training={"steps": steps}, checkpoint={"every": 4})
    run(in_steps, tmp_path / "run")
    assert losses(tmp_path / "run") == losses(folder)


def test_more_epochs_extend_a_run_and_fewer_do_not(two_epochs, tmp_path):
    values, folder = two_epochs
    content = run(by_epochs(values, 0.75), folder)
    assert content["steps"] == math.ceil(0.75 * content["data"]["rows"] / 8)
    assert [row["step"] for row in rows(folder)] == list(range(1, content["steps"] + 1))
    with pytest.raises(InputError, match=r"training\.epochs: 0\.75 -> 0\.25"):
        run(by_epochs(values, 0.25), folder)
    with pytest.raises(InputError, match=r"has done .* steps already"):
        run(by_epochs(values, 0.25), tmp_path / "fork", fork=folder)


def test_a_tokenizer_that_is_not_there_makes_the_number_of_steps_an_estimate(dataset, tmp_path):
    values = by_epochs(full(dataset), 0.2)
    plan = modicum.plan(modicum.Recipe(**values))
    assert not plan.counts["exact"]
    content = run(values, tmp_path / "run")
    assert content["data"]["exact"]
    assert content["steps"] == math.ceil(0.2 * content["data"]["rows"] / 8)
    assert plan.counts["rows"] == pytest.approx(content["data"]["rows"], rel=0.1)


def test_examples_that_are_too_long_are_reported(questions, finished, tmp_path):
    heard = []
    data = {
        "path": str(questions),
        "column": "answer",
        "prompt_column": "question",
        "sequence_length": 16,
    }
    values = lora(finished, questions, data=data, training={"steps": 1})
    plan = modicum.plan(modicum.Recipe(**values))
    content = run(values, tmp_path / "run", listener=heard.append)
    counts = content["data"]
    assert plan.counts == counts
    assert counts["truncated"] > 0
    assert plan.row()["counts"]["truncated"] == counts["truncated"]
    (warning,) = [event["message"] for event in heard if event["event"] == "warning"]
    assert f"{counts['truncated']} truncated at the front of their prompt" in warning
