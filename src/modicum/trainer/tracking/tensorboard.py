"""TensorBoard: event files in the run folder, for `tensorboard --logdir RUN`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modicum.trainer.tracking.base import Tracked


class TensorBoardTracker:
    """Writes event files; what an interrupted process wrote of steps that come again is purged.

    Args:
        tracked: the run.
        writer: the class `torch.utils.tensorboard.SummaryWriter`, or one like it.
    """

    def __init__(self, tracked: Tracked, writer: Any) -> None:
        self._make, self._folder = writer, tracked.folder / "tensorboard"
        self._writer: Any = None

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Take a step's figures."""
        if self._writer is None:
            # A run resumes with its next step, or with the evaluation after the last one.
            first = step if any(name.startswith("train/") for name in figures) else step + 1
            self._writer = self._make(log_dir=str(self._folder), purge_step=first)
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self, status: str) -> None:
        """Write what is still held."""
        if self._writer is not None:
            self._writer.close()


def begin(tracked: Tracked, package: Any) -> TensorBoardTracker:
    """The tracker of a run, by its library."""
    return TensorBoardTracker(tracked, package.SummaryWriter)
