"""Weights & Biases, by its own settings (WANDB_API_KEY, WANDB_MODE, `wandb login`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modicum.trainer.tracking.base import Tracked
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
        self._last = self._run.step - 1 if self._run.resumed else -1

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Take a step's figures."""
        if step > self._last:
            self._run.log(dict(figures), step=step)

    def close(self, status: str) -> None:
        """End the run there."""
        self._run.finish(exit_code=0 if status == "finished" else 1)


def begin(tracked: Tracked, package: Any) -> WandbTracker:
    """The tracker of a run, by its library."""
    return WandbTracker(tracked, package)
