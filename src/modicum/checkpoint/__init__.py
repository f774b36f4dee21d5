"""Checkpoints: what a run needs to go on, kept so that a crash at any moment loses little."""

from modicum.checkpoint.store import Checkpoint, CheckpointStore

__all__ = ["Checkpoint", "CheckpointStore"]
