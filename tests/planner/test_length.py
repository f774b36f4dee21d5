"""How long runs are whose length or warm-up is not given in steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.core.errors import InputError
from modicum.data.sampler import Sampler
from modicum.planner import plan
from modicum.planner.length import RunLength
from modicum.planner.planning import asked_of
from modicum.planner.why import why
from modicum.recipe import Recipe, TrainingSection

Make = Callable[..., Recipe]


def length(update: int = 1, rows: int | None = None, **fields: Any) -> RunLength:
    return RunLength.of(TrainingSection(**fields), update, rows)


@given(st.integers(1, 10**15), st.integers(1, 4096), st.integers(2, 10**6))
def test_tokens_are_read_in_full_updates_and_no_update_more(
    tokens: int, batch: int, row: int
) -> None:
    update = batch * row
    steps = length(update, tokens=tokens, batch_size=batch).steps
    assert tokens <= steps * update < tokens + update
    assert length(update, steps=steps, warmup_tokens=tokens).warmup == steps


@given(st.integers(1, 2000), st.integers(1, 16), st.integers(1, 16))
def test_runs_of_any_batch_size_read_the_same_rows(tokens: int, one: int, other: int) -> None:
    row, rows = 7, 29

    def read(batch: int) -> list[int]:
        sampler = Sampler(rows, batch, seed=3)
        steps = length(batch * row, tokens=tokens).steps
        return [index for step in range(steps) for index in sampler.indices(step)]

    both = math.ceil(tokens / row)
    assert read(one)[:both] == read(other)[:both]
    assert both <= len(read(one)) < both + one


@given(st.floats(0, 0.99), st.integers(1, 10**6))
def test_a_part_of_all_updates_is_the_nearest_number(part: float, steps: int) -> None:
    found = length(steps=steps, warmup_fraction=part).warmup
    assert found == 0 if part == 0 else abs(found - part * steps) <= 0.5 or found == 1


def test_a_fall_is_of_the_flat_schedule_alone() -> None:
    assert length(steps=1000).decay == 0
    assert length(steps=1000, schedule="flat").decay == 200
    assert length(steps=1000, schedule="flat", decay_fraction=0.05).decay == 50
    assert length(steps=3, schedule="flat", decay_fraction=0.05).decay == 1


def test_a_plan_says_how_many_steps_tokens_are_and_why(new: Make) -> None:
    training = {
        "tokens": "10k", "batch_size": 6, "warmup_fraction": 0.25, "schedule": "flat",
        "decay_fraction": 0.5,
    }  # fmt: skip
    recipe = new(training=training)
    made = plan(recipe)
    assert made.steps == math.ceil(10_000 / (6 * 128)) == 14
    row = made.row()
    assert (row["steps"], row["tokens"], row["warmup_steps"], row["decay_steps"]) == (
        14, 14 * 768, 4, 7,
    )  # fmt: skip
    assert row["steps_why"] == "training.tokens 10,000, 768 in an update, rounded up"
    assert row["warmup_why"] == "training.warmup_fraction 0.25"
    asked = asked_of(recipe)
    said = why(asked, made, "training.steps", "r.yaml:3")
    assert (said["value"], said["by"]) == (14, "you")
    assert said["why"] == f"{row['steps_why']}; written in r.yaml:3"
    said = why(asked, made, "training.warmup_steps")
    assert (said["value"], said["why"]) == (4, row["warmup_why"])
    assert why(asked, made, "training.tokens", "r.yaml:3")["value"] == 10_000


def test_a_run_in_tokens_costs_what_it_costs_in_steps(new: Make) -> None:
    every, tokens = {"every": 4}, {"tokens": 4 * 6 * 128, "batch_size": 6}
    made = [
        plan(new(training=training, checkpoint=every))
        for training in (tokens, {"steps": 4, "batch_size": 6}, tokens | {"tokens": "9k"})
    ]
    held = [sum(entry.bytes for entry in each.prediction.ledger.entries) for each in made]
    assert held[0] == held[1]
    assert held[0] < held[2]  # a copy of the state, of a checkpoint on the way


def test_epochs_are_a_reason_too_and_steps_are_none(new: Make) -> None:
    made = plan(new(training={"epochs": 3, "batch_size": 2}))
    rows = made.counts["rows"]
    assert made.derived["training.steps"].why == (
        f"training.epochs 3 of {rows} rows, 2 in an update, rounded up"
    )
    written = plan(new(training={"steps": 3, "warmup_steps": 1}))
    assert written.derived == {}
    assert (written.row()["steps_why"], written.row()["warmup_why"]) == (None, None)
    assert written.row()["warmup_steps"] == 1


@pytest.mark.parametrize(
    ("training", "said"),
    [
        ({"tokens": "2M"}, r"training\.tokens: the task images counts images, and not tokens; "
         r"give training\.steps or training\.epochs instead \(found: 2000000\)"),
        ({"warmup_tokens": 100}, r"training\.warmup_tokens: .* give training\.warmup_steps or "
         r"training\.warmup_fraction instead"),
    ],
)  # fmt: skip
def test_what_has_no_tokens_has_no_length_in_them(training: dict[str, Any], said: str) -> None:
    recipe = Recipe(task={"method": "images"}, training=training)
    with pytest.raises(InputError, match=said):
        plan(recipe)


def test_a_stream_has_a_length_in_tokens(new: Make, tokenizer_folder: Path) -> None:
    data = {"streaming": True, "tokenizer": str(tokenizer_folder)}
    recipe = new(data=data, training={"tokens": "100k"})
    assert plan(recipe).steps == math.ceil(100_000 / (32 * 128))
