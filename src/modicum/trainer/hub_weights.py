"""Weights of a model of the hub, downloaded when a run begins: a plan needs none."""

from __future__ import annotations

from dataclasses import replace

from modicum.core.errors import InputError
from modicum.core.ranks.ranks import Ranks
from modicum.models.hub_models import PREFIX, download_weights
from modicum.planner import Plan


def with_weights(plan: Plan, ranks: Ranks) -> Plan:
    """The plan of a model whose weights are on this machine; rank 0 downloads them first.

    Raises:
        InputError: they cannot be downloaded, or are of another dtype than config.json says, by
            which the plan was made.
    """
    path = plan.recipe.model.path or ""
    if not path.startswith(PREFIX):
        return plan
    try:
        ranks.first_alone(lambda: download_weights(path))  # some hosts may have them, others not
    except InputError as error:
        raise error.located(field="model.path") from None
    if plan.inputs.weights:
        return plan
    inputs = plan.task.look(plan.recipe)
    if inputs.dtypes != plan.inputs.dtypes:
        planned, found = (", ".join(sorted(each.dtypes)) for each in (plan.inputs, inputs))
        raise InputError(
            f"its config.json says {planned or 'no dtype'}, which was planned for, and the weights "
            f"are {found}; they are on this machine now, and the same command plans with them",
            field="model.path",
            value=path,
        )
    return replace(plan, inputs=inputs)
