"""Tasks: model, data, loss and metric under one name, which a recipe can say."""

from __future__ import annotations

from typing import Any

from modicum.recipe import Recipe
from modicum.tasks.base import Data, Inputs, Task
from modicum.tasks.causal_lm import CausalLM

AnyTask = Task[Any, Any, Any]

__all__ = ["AnyTask", "CausalLM", "Data", "Inputs", "Task", "task_of"]


def task_of(recipe: Recipe) -> AnyTask:
    """The task that a recipe names: text, where it names none."""
    method = recipe.method("task")
    if method is None:
        return CausalLM()
    task = method.bind(None)
    assert isinstance(task, Task)
    return task
