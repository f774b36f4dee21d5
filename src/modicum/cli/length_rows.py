"""What a plan says of a run's length, as rows of a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modicum.core.units import format_count
from modicum.report.numbers import number

# From this on a model as a rule learns its rows by heart.
_MANY_EPOCHS = 50


def length_rows(plan: Mapping[str, Any], about: str = "") -> list[tuple[str, str, str]]:
    """Steps, from what they follow and what they read; those that warm up, and that fall.

    Args:
        plan: a row of plan.jsonl, also of an earlier version.
        about: what stands before a number of epochs.
    """
    steps, epochs, tokens, warmup, decay = (
        number(plan.get(key))
        for key in ("steps", "epochs", "tokens", "warmup_steps", "decay_steps")
    )
    if steps is None:
        return []
    why = plan.get("steps_why")
    said = ["updates"] if why is None else [f"updates: {why}"]
    if tokens is not None:
        said.append(f"{tokens:,} tokens read")
    if epochs is not None:
        said.append(f"{about}{epochs:.3g} epochs (passes over the rows)")
    if epochs is not None and epochs >= _MANY_EPOCHS:
        field = "training.steps" if why is None else str(why).partition(" ")[0]
        said[-1] += f": each row is read that often, so lower {field} unless you mean it"
    found = [("steps", f"{steps:,}", "; ".join(said))]
    if warmup:
        rises = "the first ones, in which the learning rate rises"
        why = plan.get("warmup_why") or rises
        found.append(("warm-up", format_count(int(warmup), "step"), str(why)))
    if decay:
        found.append(
            ("fall", format_count(int(decay), "step"), "the last ones, of the learning rate")
        )
    return found
