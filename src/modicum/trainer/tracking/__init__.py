"""Where a run can be followed next to its own files: TensorBoard, W&B, MLflow, by one interface."""

from modicum.trainer.tracking.base import Tracked, TrackedListener, Tracker, followed, package

__all__ = ["Tracked", "TrackedListener", "Tracker", "followed", "package"]
