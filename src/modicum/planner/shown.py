"""A plan as a notebook shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modicum.core.html import html_table
from modicum.core.units import format_bytes, format_count, format_duration


def plan_html(row: Mapping[str, Any]) -> str:
    """A row of `plan.jsonl` as two tables: what was chosen and why, what it will cost."""
    choices = [(each["field"], each["value"], each["why"]) for each in row["choices"]]
    prediction, parameters = row["prediction"], row["parameters"]
    process, budget = prediction["process_bytes"], prediction["budget_bytes"]
    limit = "no budget was set" if budget is None else f"the budget is {format_bytes(budget)}"
    trained, total = parameters["trainable"], parameters["total"]
    peak, epochs = format_bytes(prediction["peak_bytes"]), row["epochs"]
    held = [("tensors", peak, f"at the peak; {limit}")]
    if process is not None:  # a budget is of the process there, and not of its tensors
        held = [("tensors", peak, "at the peak"), ("process", format_bytes(process), limit)]
    of = [] if row.get("steps_why") is None else [str(row["steps_why"])]
    if epochs is not None:
        of.append(f"{epochs:.2f} epochs")
    warmup = []
    if row.get("warmup_steps"):
        warmup = [
            ("warm-up", format_count(row["warmup_steps"], "step"), row.get("warmup_why") or "")
        ]
    costs = [
        ("parameters", f"{trained:,}", f"trained, of {total:,}"),
        *held,
        ("steps", f"{row['steps']:,}", "; ".join(of)),
        *warmup,
        ("speed", f"{prediction['tokens_per_second']:,.0f} tokens/s", ""),
        ("time", format_duration(prediction["seconds"]), f"on {row['ranks']} × {row['device']}"),
    ]
    chosen = html_table("Plan", ("choice", "value", "why"), choices) if choices else ""
    return chosen + html_table("Cost", ("cost", "predicted", ""), costs)
