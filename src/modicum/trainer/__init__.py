"""The trainer: a plan in, a run folder out."""

from modicum.trainer.loop import train
from modicum.trainer.resume import continued

__all__ = ["continued", "train"]
