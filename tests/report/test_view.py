"""What the page of a run says at its head."""

from __future__ import annotations

import pytest

from modicum.report.view import data_lines, subject


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


@pytest.mark.parametrize(
    ("tokens", "said"),
    [(2690, "trained them 2.69 times each, on average"), (None, "1,000 trained tokens; 0.0 %")],
)
def test_the_data_say_how_often_the_run_trained_them(tokens: int | None, said: str) -> None:
    counts = {"rows": 9, "documents": 3, "trained": 1000, "waste": 0.0}
    assert said in data_lines({"data": counts, "tokens": tokens})[0]
