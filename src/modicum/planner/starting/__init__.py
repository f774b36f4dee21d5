"""A recipe to start from, made by looking at a model, at data and at this machine."""

from modicum.planner.starting.common import Start
from modicum.planner.starting.draft import OpenQuestion, Setting
from modicum.planner.starting.start import start

__all__ = ["OpenQuestion", "Setting", "Start", "start"]
