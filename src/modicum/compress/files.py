"""A compressed model's folder: every tensor as it is, and which layers have which form.

For models of any kind. The built-in decoder has a folder of its own, in Hugging Face's layout, in
`modicum.models.huggingface`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modicum.compress.base import Compressor
from modicum.core.errors import InputError
from modicum.core.files import check_replaced, publish_folder, read_json, write_json
from modicum.core.layers.form_plan import FormPlan
from modicum.core.layers.full_model import COMPRESSION
from modicum.core.ranks.sharding import whole

TENSORS, DESCRIPTION = "compressed.safetensors", "compressed.json"
_FILES = {TENSORS, DESCRIPTION, COMPRESSION}


def save(
    model: nn.Module,
    plan: FormPlan,
    method: Compressor | None,
    folder: str | Path,
    *,
    write: bool = True,
    kept: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model with its forms to `folder`, in full or not at all; tied tensors once.

    A compressed model that is there already is replaced.

    Args:
        plan: the forms of the layers that have one, by full name, and the widths of blocks.
        method: what fitted them; None where that is not known.
        write: of a model that is sharded over ranks every rank calls this, and one writes.
        kept: which units of the full model are left, as `Reduction.as_json` says it.

    Raises:
        InputError: the disk is full or cannot be written; the folder holds other files, or is the
            one that this process runs in.
    """
    check_replaced(Path(folder), "model", lambda found: found - _FILES)
    tensors = {name: whole(value.detach()) for name, value in _once(model).items()}
    if write:
        about: dict[str, Any] = {"version": 2, "forms": plan.as_json()}
        if method is not None:
            about["method"] = {"name": method.info.name} | method.model_dump(mode="json")
        if kept is not None:
            about["kept"] = kept
        with publish_folder(Path(folder)) as temporary:
            named = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(named, temporary / TENSORS, metadata={"format": "pt"})
            write_json(temporary / DESCRIPTION, about)
    return Path(folder)


def read(folder: Path) -> tuple[FormPlan, dict[str, Tensor], Any]:
    """The plan of forms, all tensors of a model, and which units it kept, if it lost some.

    Raises:
        InputError: the folder holds no compressed model.
    """
    try:
        about = read_json(folder / DESCRIPTION)
        plan = FormPlan.from_json(about["forms"])
        return plan, load_file(folder / TENSORS), about.get("kept")
    except (InputError, OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError("this folder holds no compressed model", file=folder) from None


@torch.no_grad()
def put(tensors: Mapping[str, Tensor], model: nn.Module, folder: Path) -> None:
    """Copy a file's tensors into a model that has the forms already.

    Raises:
        InputError: names or shapes are another model's.
    """
    own = _once(model)
    for name in sorted(own.keys() | tensors.keys()):
        if name not in own or name not in tensors or own[name].shape != tensors[name].shape:
            raise InputError("the folder holds another model", file=folder, field=name)
        own[name].copy_(tensors[name])


def _once(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters and buffers that files keep, each by the first of its names."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {n: tensor for n, tensor in state.items() if first.setdefault(id(tensor), n) == n}
