"""Makes a full model the small one that a folder holds."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from modicum.compress import files
from modicum.compress.base import Compressed
from modicum.compress.compressed_model import CompressedModel
from modicum.compress.pruned_model import PrunedModel
from modicum.compress.pruned_parts import parts_of
from modicum.core.errors import InputError
from modicum.core.layers.full_model import FullModel, note_full_model
from modicum.core.layers.map import map_of
from modicum.core.layers.map_kept import Reduction


def load(model: nn.Module, folder: str | Path) -> CompressedModel | PrunedModel:
    """Give a full model the forms or widths that a handle's `save` found, and all its numbers.

    Raises:
        InputError: the folder holds no compressed model, or one of another model.
    """
    folder = Path(folder)
    plan, tensors, kept = files.read(folder)
    compressed: Compressed
    try:
        if plan.blocks:
            found = map_of(model)
            compressed = PrunedModel(model, tuple(parts_of(model, found.blocks, plan)))
            reduction = None if kept is None else Reduction.from_json(kept, found)
        else:
            compressed = CompressedModel(model, plan)
    except InputError as error:
        problem = f"the folder holds another model: {error.problem}"
        raise InputError(problem, file=folder, value=error.value) from None
    compressed.wrap()
    if isinstance(compressed, PrunedModel):
        compressed.reduction = reduction
        note_full_model(model, None if reduction is None else FullModel(reduction))
    files.put(tensors, model, folder)
    return compressed
