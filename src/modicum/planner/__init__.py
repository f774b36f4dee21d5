"""The planner: a recipe and a machine in, a plan that keeps the budget out."""

from modicum.planner.plan import Plan, plan

__all__ = ["Plan", "plan"]
