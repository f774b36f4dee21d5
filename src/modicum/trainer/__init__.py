"""The trainer: a plan in, a run folder out."""

from modicum.trainer.loop import train

__all__ = ["train"]
