"""The planner: a recipe and a machine in, a plan that keeps the budget out."""

from modicum.planner.plan import Plan, carried, same_start
from modicum.planner.planning import plan

__all__ = ["Plan", "carried", "plan", "same_start"]
