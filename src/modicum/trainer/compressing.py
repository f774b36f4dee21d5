"""A run that begins by making its model smaller: calibrated, fitted, and then trained like others.

That is done once, before the first update; what it made is kept in the run folder, and is the base
model of the run from there on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modicum.compress.base import Compressor
from modicum.core.contracts.method import Context
from modicum.core.files import located, write_json
from modicum.core.layers.basis_cache import bases_kept_in, own_folder
from modicum.core.layers.full_model import COMPRESSION, full_model_of
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.progress import StageProgress
from modicum.core.ranks.ranks import Ranks
from modicum.core.weight_digests import weight_digests
from modicum.data.rank_split import share
from modicum.planner import Plan
from modicum.planner.compression import held_in_half
from modicum.tasks import Data


def with_base_compressed(
    plan: Plan, data: Data[Any], folder: Path, ranks: Ranks, progress: StageProgress
) -> Plan:
    """The plan with the compressed model in place of the recipe's, if it compresses any.

    Every rank holds the dense model for it, in bf16 where the run holds it so, and looks at its
    part of the examples; the first one writes what comes of it. The plan has counted that.
    """
    method = plan.recipe.method("compress")
    if method is None:
        return plan
    assert isinstance(method, Compressor)
    if not ranks.broadcast(folder.is_dir()):
        _compress(plan, method, data, folder, ranks, progress)
    plan = replace(plan, inputs=plan.task.compressed(plan.inputs, folder), compressed=True)
    # Where weights said what layers have, the plan has counted the most that there may be.
    return plan.with_choices(plan.choices) if "plans_from_weights" in method.traits else plan


def _compress(
    plan: Plan,
    method: Compressor,
    data: Data[Any],
    folder: Path,
    ranks: Ranks,
    progress: StageProgress,
) -> None:
    config = plan.task.uncompressed(plan.task.config(plan.inputs, data), plan.inputs)
    with on_meta(torch.bfloat16 if held_in_half(plan.recipe) else torch.float32):
        model = plan.task.model(config)
    materialise(model, torch.device(plan.device))
    plan.task.fill(model, plan.inputs)
    base = plan.inputs.model_folder
    with bases_kept_in(None if base is None else own_folder(base)):
        calibration = method.calibrate(
            model,
            first_examples(plan, data, ranks, method.examples),
            plan.task.loss_sum,
            ranks=ranks,
            progress=lambda done, total: progress("calibrating", done, total),
        )
        compressed = method.bind(Context(model, plan.recipe.training.seed))
        compressed.fit(
            calibration,
            ranks=ranks,
            progress=lambda done, total: progress("compressing", done, total),
        )
    about = {"method": {"name": method.info.name} | method.model_dump(mode="json")}
    # In full or not at all: what the folder says has the digests of what is in it.
    unsaid = folder.with_name(f"{folder.name}-unsaid")
    if not plan.task.export_small(model, data, unsaid, write=ranks.first, every=True):
        plan.task.export(model, data, unsaid, write=ranks.first)
    if ranks.first:
        _say(model, about | compressed.facts(), plan.inputs.model_folder, unsaid)
        unsaid.rename(folder)
    ranks.sum(0)  # nobody continues before it is written


def _say(model: nn.Module, about: dict[str, Any], full_folder: Path | None, folder: Path) -> None:
    """Write into the small model's folder what was done, and of which full model it is a part."""
    digests, part = weight_digests(full_folder), full_model_of(model)
    if part is None:
        write_json(folder / COMPRESSION, about | {"full_weights": digests})
    else:
        where = located(None if full_folder is None else str(full_folder))
        replace(part, folder=where, weights=digests).write(folder, about)


def first_examples(
    plan: Plan, data: Data[Any], ranks: Ranks, count: int | None = None, least: int = 1
) -> Iterator[Any]:
    """This rank's part of the examples that the run will train on, in that order.

    Args:
        count: as many, over all ranks; None: each of the data's rows once.
        least: in so many batches at least, where there are as many.
    """
    left = min(count or len(data.train), len(data.train))
    size = plan.prediction.choice.micro_batch_size
    step = 0
    chosen: list[int] = []
    while len(chosen) < left:
        chosen += data.sampler.indices(step)
        step += 1
    own = share(chosen[:left], ranks)
    size = max(1, min(size, len(own) // least))
    for first in range(0, len(own), size):
        yield data.train.batch(own[first : first + size]).to(plan.device)
