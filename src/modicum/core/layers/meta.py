"""Modules without memory: shapes and names first, numbers later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from modicum.core.contracts.parameters import keeping_metadata
from modicum.core.layers.form_layer import FormLayer
from modicum.core.ranks.sharding import is_sharded


@contextmanager
def on_meta(dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Build modules on the meta device, without the first values that have no place there.

    `dtype` is that of parameters which do not say another.

    Drawing random numbers on the meta device, as `nn.Linear` would, makes torch import sympy and
    all its decompositions: 80 MB and a second, for nothing.

    >>> with on_meta():
    ...     layer = torch.nn.Linear(3, 2)
    >>> layer.weight.device.type, layer.weight.shape
    ('meta', torch.Size([2, 3]))
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), _Unfilled():
            yield
    finally:
        torch.set_default_dtype(before)


def materialise(module: nn.Module, device: torch.device | str) -> None:
    """Give every parameter of a module memory on `device`; what stands in it is undefined.

    Of a parameter that is sharded over ranks, each gets memory for its own part. What is attached
    to parameters (`ParameterMetadata`) stays with their names, and a parameter that has several
    names keeps them all. A module that has a method `compute_buffers` is asked for its buffers.
    """
    shared = _shared(module)
    with keeping_metadata(module):
        _materialise(module, device)
    for name, others in shared.items():
        for other in others:
            path, _, leaf = other.rpartition(".")
            setattr(module.get_submodule(path), leaf, module.get_parameter(name))
    if callable(compute := getattr(module, "compute_buffers", None)):
        compute(device)


def _shared(module: nn.Module) -> dict[str, list[str]]:
    """Of each parameter that has several names the first, with the others."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: others for first, *others in names.values() if others}


def _materialise(module: nn.Module, device: torch.device | str) -> None:
    if any(is_sharded(parameter) for parameter in module.parameters()):
        module.to_empty(device=device)
        return
    # Here `to_empty` would ask the meta device for its tensors' likeness: sympy again.
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(part, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
        if isinstance(part, FormLayer):
            for name, buffer in part.named_buffers(recurse=False):
                setattr(part, name, torch.zeros_like(buffer, device=device))


class _Unfilled(TorchFunctionMode):
    """Leaves tensors as they are where `torch.nn.init` would fill them."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
