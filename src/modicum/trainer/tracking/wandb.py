"""Weights & Biases, by its own settings (WANDB_API_KEY, WANDB_MODE, `wandb login`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modicum.trainer.tracking.base import GROUPS, Tracked
from modicum.trainer.tracking.identity import kept_id


class WandbTracker:
    """One run there for one run folder; a step that is there already is not sent again.

    Args:
        tracked: the run.
        wandb: the module.
    """

    def __init__(self, tracked: Tracked, wandb: Any) -> None:
        self._run = wandb.init(
            project=tracked.project,
            name=tracked.name,
            id=kept_id(tracked.folder, "wandb"),
            resume="allow",
            dir=str(tracked.folder),
            config=dict(tracked.recipe),
        )
        # W&B's own count of steps never goes back, and an evaluation may come after the step that
        # it belongs to: so each group of figures has an axis of its own.
        self._last = {}
        for group in GROUPS:
            self._run.define_metric(f"{group}/*", step_metric=f"{group}/step")
            seen = self._run.summary.get(f"{group}/step") if self._run.resumed else None
            self._last[group] = -1 if seen is None else int(seen)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Take a step's figures."""
        for group in GROUPS:
            named = {name: value for name, value in figures.items() if name.startswith(f"{group}/")}
            if named and step > self._last[group]:
                self._run.log({f"{group}/step": step, **named})

    def close(self, status: str) -> None:
        """End the run there."""
        self._run.finish(exit_code=0 if status == "finished" else 1)


def begin(tracked: Tracked, package: Any) -> WandbTracker:
    """The tracker of a run, by its library."""
    return WandbTracker(tracked, package)
