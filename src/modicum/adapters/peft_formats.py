"""PEFT's formats: which one holds an adapter, and the folder of any of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from torch import nn

from modicum.adapters import peft_files, peft_randlora, peft_shira
from modicum.adapters.attachment import Attachment
from modicum.adapters.folding import Folding
from modicum.adapters.native_files import StoredAdapter, read_json
from modicum.adapters.peft_slices import has_slices
from modicum.core.errors import InputError

# By `peft_type`; all others are those of `peft_files`, or refused there.
_OTHERS = {peft_randlora.PEFT_TYPE: peft_randlora, peft_shira.PEFT_TYPE: peft_shira}


def exact_form(attached: Attachment) -> Literal["peft", "modicum"]:
    """`peft` where a format of PEFT's holds the adapter exactly, for the model as it was before.

    Not of slices: from there they would come back as one LoRA of all of the layer.
    """
    return "peft" if why_not(attached) is None and not has_slices(attached) else "modicum"


def why_not(attached: Attachment) -> str | None:
    """Why no format of PEFT's can hold an adapter; None: one holds it exactly."""
    other = _OTHERS.get(attached.method.peft_type)
    if other is not None and has_slices(attached):
        return f"PEFT has no {attached.method.info.name} on a slice of a layer"
    return (other or peft_files).why_not(attached)


def save(
    attached: Attachment,
    folder: Path,
    *,
    base_model: str | None,
    rest: bool,
    write: bool,
    folding: Folding | None = None,
) -> None:
    """Write the adapter in its format, or the LoRA that it is folded into; see `AttachedAdapter`.

    Raises:
        InputError: it cannot hold the adapter exactly.
    """
    other = _OTHERS.get(attached.method.peft_type)
    if other is not None and folding is None and has_slices(attached):
        problem = f'{why_not(attached)}; use form="modicum", or merge it and save the model'
        raise InputError(problem, value=next(iter(attached.sites)))
    if other is None or folding is not None:
        how: Any = {"rest": rest, "write": write, "folding": folding}
        peft_files.save(attached, folder, base_model=base_model, **how)
    else:
        other.save(attached, folder, base_model=base_model, write=write)


def read(folder: Path, model: nn.Module) -> StoredAdapter:
    """The adapter that a folder of PEFT's holds for a model; errors are those of `files.load`."""
    kind = read_json(folder / peft_files.CONFIG).get("peft_type")
    other = _OTHERS.get(kind) if isinstance(kind, str) else None
    return peft_files.read(folder, model) if other is None else other.read(folder, model)
