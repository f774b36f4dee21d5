"""What a run gives: the trained weights in files that others read."""

from __future__ import annotations

from typing import Any

import torch

from modicum.adapters.travel import loaded_as
from modicum.core.files import write_json
from modicum.core.layers.full_model import full_model_of
from modicum.core.weight_digests import BASE_WEIGHTS, weight_digests
from modicum.planner.precision import exported_dtype
from modicum.trainer.session import Session


def export(session: Session) -> dict[str, str]:
    """The trained weights where others read them: a PEFT folder, or a Hugging Face one."""
    session.emit("phase", name="exporting", done=0, total=None)
    session.step_program.flush()
    if session.adapter is not None:
        folder = session.plan.inputs.model_folder
        full = session.adapter.for_full_model()
        base = str(folder) if full is None else full.folder
        target = session.folder.path / "adapter"
        session.adapter.save(target, base_model=base, write=session.ranks.first)
        if (said := loaded_as(session.adapter)) is not None:
            session.emit("export", message=f"{target} is {said}")
        if session.ranks.first:
            digests = weight_digests(folder) if full is None else dict(full.weights)
            write_json(target / BASE_WEIGHTS, digests)
        return {"adapter": "adapter/"}
    target = session.folder.path / "model"
    task, model, data = session.plan.task, session.model, session.data
    named = exported_dtype(session.plan.recipe, session.plan.inputs.dtypes)
    how: Any = {"write": session.ranks.first, "dtype": getattr(torch, named)}
    task.export(model, data, target, **how)
    part = full_model_of(model)
    if part is not None and session.ranks.first:
        part.write(target)
    outputs = {"model": "model/"}
    if task.export_small(model, data, session.folder.path / "compressed", **how):
        outputs["compressed"] = "compressed/"
    return outputs
