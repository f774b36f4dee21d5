"""A plan's line in `plan.jsonl`, of which reports, pages and later starts are made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modicum.planner.cost import cost_of
from modicum.planner.length import shown_length
from modicum.planner.resuming import asked_at_start

if TYPE_CHECKING:
    from modicum.planner.plan import Plan


def plan_row(plan: Plan) -> dict[str, Any]:
    """A plan as plain values."""
    ledger, recipe = plan.prediction.ledger, plan.recipe
    layout, rate = plan.prediction.choice.layout, plan.tokens_per_second
    least_most = plan.process_range
    more: dict[str, Any] = {}
    if plan.profile is not None:
        more["machine"] = plan.profile.described(plan.prediction.wire_bytes)
    if plan.prediction.travel is not None:
        more["adapter"] = plan.prediction.travel.row()
    if plan.prediction.treated:
        more["optimizer"] = [treated.row() for treated in plan.prediction.treated]
    if plan.uses:
        more["room"] = [use.row() for use in plan.uses]
    if plan.advice:
        more["advice"] = list(plan.advice)
    if plan.exchanges:
        more["exchanges"] = list(plan.exchanges)
    if (wire := plan.wire_time) is not None:
        more["link"] = {"busy_seconds": wire.busy, "waited_seconds": wire.waited}
    return {
        **more,
        "revision": plan.revision,
        "when": plan.when,
        "why": plan.why,
        "ranks": plan.ranks,
        "layout": {
            "name": layout.name,
            "replicas": layout.replicas,
            "shards": layout.shards,
        },
        "asked": asked_at_start(recipe),
        "choices": list(plan.choices),
        "prediction": {
            "peak_bytes": plan.prediction.peak_bytes,
            "peak_before": plan.prediction.peak_before,
            "counts_the_most": plan.counts_the_most,
            "process_bytes": plan.process_bytes,
            "process_range": None if least_most is None else list(least_most),
            "process_base": plan.process_base if plan.device == "cpu" else None,
            "budget_bytes": plan.budget,
            "ledger": "traced" if plan.prediction.traced else "arithmetic",
            "table": ledger.table(),
            "by_phase": ledger.by_phase(),
            "wire_bytes": plan.prediction.wire_bytes,
            "wire": plan.prediction.wire_rows(),
            "tokens_per_second": rate,
            "seconds": plan.seconds,
            "seconds_in_fp32": plan.seconds_in_fp32,
            **cost_of(recipe.cost, plan.seconds),
        },
        "parameters": {
            "total": plan.prediction.total,
            "trainable": plan.prediction.trainable,
        },
        "tokens_per_update": plan.tokens_per_update,
        **shown_length(recipe.training, plan.tokens_per_update, plan.rows, plan.task.unit),
        "counts": dict(plan.counts),
        "device": plan.device,
        "weights": plan.inputs.weights,
        "data": plan.inputs.described,
    }
