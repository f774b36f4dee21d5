"""The metrics of a finished run on a part of its data, with the weights that it has exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from modicum.core.errors import InputError
from modicum.core.progress import StageProgress
from modicum.core.ranks.ranks import Ranks
from modicum.trainer.build import same_inputs
from modicum.trainer.evaluate import evaluate
from modicum.trainer.restoring import FinishedRun


def evaluate_run(
    run: str | Path,
    part: Literal["validation", "test"] = "test",
    *,
    progress: StageProgress = lambda *_: None,
) -> dict[str, Any]:
    """The task's metrics over all rows of a part that the run did not train on.

    In the run's precision, by one process; nothing is written. `modicum train` itself does so on
    the test where the recipe has `evaluation.test`.

    Args:
        run: the folder of a finished run.
        part: whose rows.

    Returns:
        The metrics by name, the count that they are means over by the task's unit (`tokens`,
        `images`), the `step` whose weights these are, and how many `rows` there were.

    Raises:
        InputError: there is no finished run, its checkpoint is gone, its data has no such part, or
            data or base model are not what they were when it began.
    """
    done = FinishedRun.of(run)
    plan = done.plan
    with done.data(progress) as data:
        rows = getattr(data, part)
        if rows is None:
            problem = f"of this run's data nothing is held out for {part}"
            raise InputError(problem, file=done.folder.path)
        _, check = same_inputs(data, done.base)
        check(done.checkpoint.state["inputs"])
        model, _ = done.restored(data)
        found = evaluate(
            plan.task,
            model,
            rows,
            rows="all",
            micro_batch_size=plan.prediction.choice.micro_batch_size,
            precision=plan.recipe.training.precision,
            ranks=Ranks(),
            check=lambda: None,
        )
    del found["seconds"]
    return {"step": done.checkpoint.step, **found, "rows": len(rows)}
