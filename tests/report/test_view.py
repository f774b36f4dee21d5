"""What the page of a run says at its head."""

from __future__ import annotations

import pytest

from modicum.report.subject import subject
from modicum.report.view import data_lines


@pytest.mark.parametrize(
    ("path", "begun_in", "shown"),
    [
        ("/home/me/runs/base", "/home/me", "runs/base"),
        ("/home/me/runs/base", "/home/m", "/home/me/runs/base"),
        ("/models/llama", "/home/me", "/models/llama"),
        ("runs/base", None, "runs/base"),
        ("/home/me/", "/home/me", "/home/me/"),
        ("hub:owner/name", 3, "hub:owner/name"),
    ],
)
def test_paths_are_shown_as_from_where_the_run_was_begun(
    path: str, begun_in: object, shown: str
) -> None:
    assert subject({"model": {"path": path}}, begun_in)["model"] == shown
    assert subject({"data": {"path": path}}, begun_in)["data"] == shown


def test_other_tasks_and_methods_are_named() -> None:
    shape = {"path": None, "layers": 1, "width": 32}
    said = subject({"model": shape, "data": {"path": None}, "optimizer": {"method": "adamw"},
                    "linear": {"method": "maestro"}, "adapter": None})  # fmt: skip
    assert said == {"model": "a new decoder, 1 block of width 32", "method": "full training",
                    "data": "the Python standard library", "others": "linear maestro"}  # fmt: skip
    task = {"method": "sequences", "data": "recall", "path": None}
    said = subject({"model": shape, "data": {"path": None}, "task": task,
                    "optimizer": {"method": "admm_rnn"}})  # fmt: skip
    assert said == {"model": "a new model of the task sequences", "method": "full training",
                    "data": "recall", "others": "optimizer admm_rnn"}  # fmt: skip
    said = subject({"task": {"method": "text_classes"}, "model": {"path": "bert"},
                    "data": {"path": "rows.jsonl"}, "optimizer": "lion"})  # fmt: skip
    assert (said["model"], said["data"], said["others"]) == ("bert", "rows.jsonl", "optimizer lion")


@pytest.mark.parametrize(
    ("tokens", "said"),
    [(2690, "trained them 2.69 times each, on average"), (None, "1,000 trained tokens; 0.0 %")],
)
def test_the_data_say_how_often_the_run_trained_them(tokens: int | None, said: str) -> None:
    counts = {"rows": 9, "documents": 3, "trained": 1000, "waste": 0.0}
    assert said in data_lines({"data": counts, "tokens": tokens})[0]
