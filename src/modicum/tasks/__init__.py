"""Tasks: model, data, loss and metric that a recipe can name."""

from modicum.tasks.causal_lm import CausalLM

__all__ = ["CausalLM"]
