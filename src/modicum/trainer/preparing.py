"""A run whose adapter begins by looking at data: once, before the first update.

What it found is kept in the run folder; a run that is killed before that is written looks again and
finds the same.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modicum.adapters.base import Adapter
from modicum.adapters.preparation import Preparation, PreparationContext, prepared_by
from modicum.core.contracts.step import autocast
from modicum.core.layers.basis_cache import bases_kept_in, own_folder
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.progress import StageProgress
from modicum.core.ranks.ranks import Ranks
from modicum.planner import Plan
from modicum.tasks import Data
from modicum.trainer.compressing import first_examples


def adapter_prepared(
    plan: Plan,
    data: Data[Any],
    folder: Path,
    ranks: Ranks,
    progress: StageProgress,
    *,
    forked_from: Path | None = None,
) -> Preparation | None:
    """What the recipe's adapter finds out from data; None where it does not ask for any.

    Every rank holds the base model for it, and looks at its part of the examples; the first one
    writes what comes of it, and all read that.

    Args:
        forked_from: what the run found whose state this one begins with, if it is there.
    """
    method = plan.recipe.method("adapter")
    if method is None or "prepares_from_data" not in method.traits:
        return None
    assert isinstance(method, Adapter)
    if not ranks.broadcast(folder.is_dir()):
        if forked_from is not None and ranks.broadcast(forked_from.is_dir()):
            found = Preparation.load(forked_from)
        else:
            found = _prepare(plan, method, data, ranks, progress, folder)
        if ranks.first:
            found.save(folder)
        ranks.sum(0)  # nobody reads before it is written
    return Preparation.load(folder)


def _prepare(
    plan: Plan,
    method: Adapter,
    data: Data[Any],
    ranks: Ranks,
    progress: StageProgress,
    folder: Path,
) -> Preparation:
    training, device = plan.recipe.training, torch.device(plan.device)
    with on_meta(torch.bfloat16 if training.precision == "bf16" else torch.float32):
        model = plan.task.model(plan.task.config(plan.inputs, data))
    materialise(model, device)
    plan.task.fill(model, plan.inputs)
    # What looks at gradients keeps every layer's input; one more forward pass costs little here.
    model.recompute = True

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with autocast(device, training.precision):
            total: Tensor = plan.task.loss_sum(model, batch)
        return total

    scratch = folder.with_name(f"{folder.name}-{ranks.rank}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)  # of a run that was killed in the middle of it
    context = PreparationContext(
        model,
        tuple(method.sites(model)),
        first_examples(plan, data, ranks, method.looks_at, method.looks_at_batches),
        loss,
        ranks,
        training.seed,
        lambda done, total: progress("preparing the adapter", done, total),
        scratch,
        plan.task.weights(plan.inputs),
    )
    base = plan.inputs.model_folder
    try:
        with bases_kept_in(None if base is None else own_folder(base)):
            return prepared_by(method.prepare, context)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
