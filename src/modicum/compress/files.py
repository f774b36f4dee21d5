"""A compressed model's folder: every tensor as it is, and which layers are factors.

For models of any kind. The built-in decoder has a folder of its own, in Hugging Face's layout, in
`modicum.models.huggingface`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modicum.compress.compressed import Compressed
from modicum.core.errors import InputError
from modicum.core.files import publish_folder, read_json, write_json
from modicum.core.sharding import whole

TENSORS, DESCRIPTION = "compressed.safetensors", "compressed.json"


def save(compressed: Compressed, folder: str | Path, *, write: bool = True) -> Path:
    """Write a model with its factors to `folder`, whole or not at all; tied tensors once.

    Args:
        write: of a model that is cut over ranks every rank calls this, and one writes.

    Raises:
        InputError: the disk is full or cannot be written.
    """
    tensors = {name: whole(value.detach()) for name, value in _once(compressed.model).items()}
    if write:
        method = compressed.method
        about: dict[str, Any] = {"version": 1, "ranks": compressed.ranks}
        if method is not None:
            about["method"] = {"name": method.info.name} | method.model_dump(mode="json")
        with publish_folder(Path(folder)) as temporary:
            named = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(named, temporary / TENSORS, metadata={"format": "pt"})
            write_json(temporary / DESCRIPTION, about)
    return Path(folder)


@torch.no_grad()
def load(model: nn.Module, folder: str | Path) -> Compressed:
    """Give a dense model the forms that `save` found, and all its numbers.

    Raises:
        InputError: the folder holds no compressed model, or one of another model.
    """
    folder = Path(folder)
    try:
        about = read_json(folder / DESCRIPTION)
        ranks = {str(name): int(rank) for name, rank in about["ranks"].items()}
        tensors = load_file(folder / TENSORS)
    except (InputError, OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError("this folder holds no compressed model", file=folder) from None
    try:
        compressed = Compressed(model, ranks)
    except InputError as error:
        problem = f"the folder holds another model: {error.problem}"
        raise InputError(problem, file=folder, value=error.value) from None
    compressed.wrap()
    own = _once(model)
    for name in sorted(own.keys() | tensors.keys()):
        if name not in own or name not in tensors or own[name].shape != tensors[name].shape:
            raise InputError("the folder holds another model", file=folder, field=name)
        own[name].copy_(tensors[name])
    return compressed


def _once(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters and buffers that files keep, each by the first of its names."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {n: tensor for n, tensor in state.items() if first.setdefault(id(tensor), n) == n}
