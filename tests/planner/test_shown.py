"""A plan as a notebook shows it."""

from __future__ import annotations

from typing import Any

from modicum.planner.shown import plan_html


def row(**prediction: Any) -> dict[str, Any]:
    return {
        "choices": [{"field": "training.micro_batch_size", "value": 4, "why": "<keeps> it"}],
        "parameters": {"total": 12_000, "trainable": 1_000},
        "prediction": {
            "peak_bytes": 500_000_000, "process_bytes": 900_000_000, "budget_bytes": 2 * 10**9,
            "tokens_per_second": 1234.5, "seconds": 90.0,
        } | prediction,
        "steps": 40, "epochs": 1.5, "ranks": 2, "device": "cpu",
    }  # fmt: skip


def test_a_plan_shows_choices_and_costs_and_nothing_is_read_as_html() -> None:
    shown = plan_html(row())
    assert "<td>4</td><td>&lt;keeps&gt; it</td>" in shown
    assert "<td>1,000</td><td>trained, of 12,000</td>" in shown
    assert "<td>process</td><td>900 MB</td><td>the budget is 2 GB</td>" in shown
    assert "<td>40</td><td>1.50 epochs</td>" in shown
    assert "on 2 × cpu" in shown


def test_on_an_accelerator_the_budget_is_of_the_tensors() -> None:
    shown = plan_html(row(process_bytes=None, budget_bytes=None))
    assert "<td>tensors</td><td>500 MB</td><td>at the peak; no budget was set</td>" in shown
    assert "process" not in shown


def test_what_was_not_chosen_is_not_shown() -> None:
    assert plan_html(row() | {"choices": [], "epochs": None}).count("<table>") == 1


def test_a_length_that_is_not_in_steps_says_what_it_follows_from() -> None:
    shown = plan_html(row() | {"steps_why": "training.tokens 2,000", "warmup_steps": 3})
    assert "<td>40</td><td>training.tokens 2,000; 1.50 epochs</td>" in shown
    assert "<td>warm-up</td><td>3 steps</td><td></td>" in shown
