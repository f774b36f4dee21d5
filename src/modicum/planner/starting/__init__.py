"""A recipe to start from, made by looking at a model, at data and at this machine."""

from modicum.planner.starting.draft import Question, Setting
from modicum.planner.starting.start import Start, start

__all__ = ["Question", "Setting", "Start", "start"]
