"""Buffers that no file holds, such as rotary frequencies: computed where a model gets its memory.

A model that is built without memory has none of their numbers. transformers computes them in each
class's `_init_weights`, next to first weights, which are left as they are here.

And tensors that are in fp32, whatever dtype the others of a model have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.layers.drawn_buffers import DrawnBuffers
from modicum.core.torch_private import is_persistent
from modicum.models.transformers.private import begin_module, kept, kept_in_fp32


@torch.no_grad()
def compute_buffers(model: Any, device: torch.device | str) -> None:
    """Give a model's buffers memory on `device`, and their numbers.

    They are computed twice, over zeros and over ones. What differs is not computed at all: a file
    must hold it.

    Raises:
        InputError: transformers does not say what stands in a buffer.
    """
    owners = [module for module in model.modules() if module._buffers or _meta(module)]
    with kept(model.parameters()):
        found = [_computed(model, owners, device, first) for first in (0, 1)]
        if missing := _open(model, found):  # a model may fill the buffers of its parts
            owners += [module for module in _around(model, missing) if module not in owners]
            found = [_computed(model, owners, device, first) for first in (0, 1)]
    for name in _open(model, found):
        raise _unknown(name)
    for module in owners:
        if _meta(module):
            raise _unknown(type(module).__name__ + "." + _meta(module)[0])


def stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that files hold, by name."""
    return {
        f"{path}.{name}".lstrip("."): buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and is_persistent(module, name)
    }


def exact_tensors(model: nn.Module) -> frozenset[str]:
    """Those parameters and `stored_buffers` that are in fp32, whatever dtype the others have.

    Such are weights and biases of routing, which choose other experts where they are rounded.
    """
    floating = (name for name, tensor in _stored(model).items() if tensor.is_floating_point())
    return frozenset(name for name in floating if kept_in_fp32(model, name))


def keep_exact(model: nn.Module) -> None:
    """Have a new model's `exact_tensors` be in fp32; what stands in them begins as zeros."""
    stored = _stored(model)
    for name in exact_tensors(model):
        if (tensor := stored[name]).dtype.itemsize < torch.float32.itemsize:
            # In place, as a parameter may have several names.
            tensor.data = torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device)


def _stored(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **stored_buffers(model)}


def _drawn(model: nn.Module) -> list[str]:
    """The buffers that their own module draws from a seed, later."""
    return [
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        if isinstance(module, DrawnBuffers)
        for name in module.drawn_names
    ]


def _open(model: nn.Module, found: list[dict[str, Tensor]]) -> list[str]:
    """The buffers that no file holds, nobody draws, and nobody has computed."""
    known = set(stored_buffers(model)) | set(_drawn(model))
    zeros, ones = found
    every = zeros.keys() - known
    return [name for name in zeros if name in every and not torch.equal(zeros[name], ones[name])]


def _around(model: nn.Module, names: list[str]) -> list[nn.Module]:
    """The modules that these buffers are in, from the inside to the outside, each once."""
    parts = [name.split(".") for name in names]
    paths = {".".join(each[:end]) for each in parts for end in range(len(each))}
    return [model.get_submodule(path) for path in sorted(paths, key=len, reverse=True)]


def _computed(
    model: Any, owners: list[nn.Module], device: torch.device | str, first: int
) -> dict[str, Tensor]:
    for module in owners:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.full_like(buffer, first, device=device)
    for module in owners:
        begin_module(model, module)
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _meta(module: nn.Module) -> list[str]:
    """Tensors among a module's plain attributes that have no memory, and never will."""
    own = vars(module).items()
    return [name for name, value in own if isinstance(value, Tensor) and value.is_meta]


def _unknown(name: str) -> InputError:
    return InputError(
        "transformers does not say what stands in this tensor of the model, and no file holds it, "
        "so the model is not trained",
        value=name,
    )
