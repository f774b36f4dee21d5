"""Loss, and whatever else a task measures, on data that is not trained on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

from torch import nn

from modicum.core.contracts.hooks_in_order import RunHooks
from modicum.core.contracts.step import autocast
from modicum.core.ranks.ranks import Ranks
from modicum.data.rank_split import micro_batches
from modicum.data.rows import AnyBatch, Rows
from modicum.tasks import AnyTask
from modicum.tasks.modes import evaluating


def evaluate(
    task: AnyTask,
    model: nn.Module,
    data: Rows[AnyBatch],
    *,
    rows: int | Literal["all"],
    micro_batch_size: int,
    precision: str,
    ranks: Ranks,
    check: Callable[[], None],
    hooks: RunHooks | None = None,
) -> dict[str, Any]:
    """The task's metrics over the first `rows` rows, or all, in micro-batches as in training.

    The ranks share the rows; `check` is called between micro-batches, on all of them alike.
    """
    start = time.perf_counter()
    device = next(model.parameters()).device
    sums: dict[str, float] = {}
    count = 0
    context = (hooks or RunHooks()).forward_context("evaluate")
    count_of_rows = len(data) if rows == "all" else min(rows, len(data))
    batches = micro_batches(data, range(count_of_rows), micro_batch_size, ranks)
    with evaluating(model), autocast(device, precision), context:
        for batch in batches:
            check()
            found = task.evaluate(model, batch.to(device))
            sums = {name: sums.get(name, 0.0) + value for name, value in found.items()}
            count += batch.count
    # Every rank has batches, idle ones where there are too few rows.
    *totals, counted = ranks.sum(*sums.values(), count)
    found = task.measures(dict(zip(sums, totals, strict=True)), round(counted))
    return {**found, task.unit: round(counted), "seconds": time.perf_counter() - start}
