"""All that a process builds of a plan, in an order in which each step sees what the one before did.

A run does this when its process begins, and again when a surgery has changed shapes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modicum.adapters import AttachedAdapter
from modicum.adapters.preparation import Preparation
from modicum.core.contracts.state import StateRegistry, View, random_view
from modicum.core.contracts.step import StepProgram
from modicum.core.machine.memory import release
from modicum.core.ranks.ranks import Ranks
from modicum.planner import Plan
from modicum.planner.choose import COMPILE
from modicum.tasks import Data
from modicum.trainer.build import add_hooks, build_model, build_program, build_strategy


@dataclass(frozen=True)
class Built:
    """What was built: the model by its configuration, what updates it, and the views of all state.

    The strategy is `step_program.strategy`, the hooks are `step_program.hooks`.
    """

    config: Any
    model: Any
    adapter: AttachedAdapter | None
    step_program: StepProgram
    registry: StateRegistry


def is_compiled(plan: Plan) -> bool:
    """Whether the plan says that blocks are compiled."""
    told = {row["field"]: row["value"] for row in plan.choices}
    return bool(told.get(COMPILE, plan.recipe.training.compile) == "blocks")


def assemble(
    plan: Plan,
    data: Data[Any],
    ranks: Ranks,
    inputs: View,
    *,
    kept: Mapping[str, torch.Tensor] | None = None,
    skip: Collection[str] = (),
    prepared: Preparation | None = None,
    start: Path | None = None,
) -> Built:
    """Build model, strategy, step program and hooks, and register their state.

    Args:
        inputs: the view of what the run began with.
        kept: the model's state in a checkpoint that the run resumes from.
        skip: parameters whose values come from a state, and not from the base model's files.
        prepared: what the adapter found out from data, if it asks for any.
        start: a folder with the adapter that training starts from, where there is no state yet.
    """
    strategy = build_strategy(plan, ranks)
    config = plan.task.config(plan.inputs, data)
    model, adapter = build_model(
        plan,
        config,
        strategy,
        compiled=is_compiled(plan),
        kept=kept,
        skip=skip,
        prepared=prepared,
        start=start,
    )
    release()
    model.train()
    program = build_program(plan, model, strategy)
    add_hooks(plan, model, adapter, strategy, program)
    registry = StateRegistry()
    strategy.register(registry, model)
    program.register(registry)
    registry.add_view(random_view(plan.recipe.training.seed, ranks))
    for name, hook in program.hooks.stateful().items():
        registry.add_object(name, hook)
    registry.add_view(inputs)
    return Built(config, model, adapter, program, registry)
