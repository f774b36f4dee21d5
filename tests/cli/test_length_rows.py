"""What a plan says of a run's length."""

from __future__ import annotations

from modicum.cli.length_rows import length_rows


def test_a_plan_says_what_steps_follow_from_and_read() -> None:
    plan = {
        "steps": 1200, "steps_why": "training.tokens 2,000", "tokens": 2048, "epochs": 1.5,
        "warmup_steps": 3, "warmup_why": None, "decay_steps": 40,
    }  # fmt: skip
    assert length_rows(plan, "about ") == [
        (
            "steps",
            "1,200",
            "updates: training.tokens 2,000; 2,048 tokens read; "
            "about 1.5 epochs (passes over the rows)",
        ),
        ("warm-up", "3 steps", "the first ones, in which the learning rate rises"),
        ("fall", "40 steps", "the last ones, of the learning rate"),
    ]


def test_a_plan_of_an_earlier_version_says_what_it_has() -> None:
    assert length_rows({}) == []
    assert length_rows({"steps": 7, "epochs": None}) == [("steps", "7", "updates")]


def test_rows_that_are_read_many_times_name_the_field_to_lower() -> None:
    [(_, _, said)] = length_rows({"steps": 7, "epochs": 50.0})
    assert said.endswith("so lower training.steps unless you mean it")
    [(_, _, said)] = length_rows({"steps": 7, "epochs": 50.0, "steps_why": "training.tokens 2M"})
    assert said.endswith("so lower training.tokens unless you mean it")
    [(_, _, said)] = length_rows({"steps": 7, "epochs": 49.9})
    assert said == "updates; 49.9 epochs (passes over the rows)"
