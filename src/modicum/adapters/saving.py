"""Which of the formats an adapter is written in, and writing it there."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch

from modicum.adapters import native_files, peft_files, peft_formats
from modicum.adapters.attachment import Attachment
from modicum.adapters.folding import Folding, folded
from modicum.core.errors import InputError
from modicum.core.files import check_replaced, located
from modicum.core.layers.full_model import FullModel, full_model_of
from modicum.core.weight_digests import BASE_WEIGHTS

Form = Literal["peft", "peft-rest", "modicum"]

_CONFIGS = {native_files.CONFIG, peft_files.CONFIG}
# What modicum and PEFT, its older versions too, write into an adapter's folder.
_FILES = _CONFIGS | {native_files.WEIGHTS, peft_files.WEIGHTS, "adapter_model.bin", BASE_WEIGHTS}
_CARD = "README.md"  # PEFT's where there is an adapter, somebody's own elsewhere
_LEFT = re.compile(r"^\.(.+)\.\d+\.part$")  # a file's name until it is complete


def full_model(attached: Attachment) -> FullModel | None:
    """The model that `save` writes the adapter for, where that is not the one that has it."""
    peft = peft_formats.exact_form(attached) == "peft"
    other = peft and "for_full_model" in attached.method.traits
    return full_model_of(attached.model) if other else None


def save(
    attached: Attachment,
    folder: str | Path,
    *,
    base_model: str | None,
    form: Form | None,
    dtype: torch.dtype | None,
    rank: int | None,
    tolerance: float,
    batches: Iterable[Any] | None,
    write: bool,
) -> Folding | None:
    """Write an adapter to a folder; see `AttachedAdapter.save`.

    Raises:
        InputError: as there.
    """
    if any(parameter.is_meta for parameter in attached.parameters()):
        problem = "the adapter is on the meta device, where tensors have no values; initialise it"
        raise InputError(problem, value=attached.name)
    target = Path(folder)
    check_replaced(target, "adapter", _others)
    base_model = located(base_model)
    folding = None
    if rank is not None:
        if form not in (None, "peft") or dtype is not None:
            problem = 'folds the adapter into a LoRA of PEFT\'s; leave out dtype, with form="peft"'
            raise InputError(problem, field="rank", value=rank)
        form, folding = "peft", folded(attached, rank, batches)
        folding.check(tolerance)
    form = form or peft_formats.exact_form(attached)
    if base_model is None and form == "peft" and (full := full_model(attached)) is not None:
        base_model = full.folder
    if form == "modicum":
        how: Any = {"base_model": base_model, "dtype": dtype, "write": write}
        native_files.save(attached, target, **how)
    elif dtype is not None:
        problem = "PEFT's files have the adapter's own precision; leave it out, or save"
        raise InputError(f'{problem} with form="modicum"', field="dtype", value=str(dtype))
    else:
        how = {"rest": form == "peft-rest", "write": write, "folding": folding}
        peft_formats.save(attached, target, base_model=base_model, **how)
    return folding


def _others(found: set[str]) -> set[str]:
    """Of the names in a folder, those that are not of an adapter."""
    files = _FILES | ({_CARD} if found & _CONFIGS else set())
    return {name for name in found if _LEFT.sub(r"\1", name) not in files}
