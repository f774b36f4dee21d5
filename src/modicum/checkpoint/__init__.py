"""Checkpoints: what a run needs to resume, kept so that a crash at any moment loses little."""

from modicum.checkpoint.loading import Checkpoint, SavedView
from modicum.checkpoint.manifest import Damaged
from modicum.checkpoint.saving import Published
from modicum.checkpoint.store import CheckpointStore

__all__ = ["Checkpoint", "CheckpointStore", "Damaged", "Published", "SavedView"]
