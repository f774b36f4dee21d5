"""The planner: a recipe and a machine in, a plan that keeps the budget out."""

from modicum.planner.plan import Plan
from modicum.planner.planning import made_to_fit, plan
from modicum.planner.resuming import carried, same_start

__all__ = ["Plan", "carried", "made_to_fit", "plan", "same_start"]
