"""What is looked at and made before an adapter is put on a model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from modicum.adapters.adapted_layer import worn
from modicum.adapters.adapter_layer import COPY, AdapterLayer, CopiesLayer
from modicum.adapters.base import Adapter, SharedFactors
from modicum.adapters.copies import Copied, empty_copy
from modicum.adapters.sites import Site, shared_name
from modicum.core.errors import InputError

_LARGEST = torch.finfo(torch.float32).max


def check_name(model: nn.Module, name: str) -> None:
    """Make sure that an adapter can have this name on a model.

    Raises:
        InputError: it is empty, has a dot, is taken, or is a word of PyTorch's containers.
    """
    if not name or "." in name:
        raise InputError("an adapter's name must not be empty or have a dot", value=name)
    if name in worn(model):
        raise InputError("an adapter of this name is attached already", value=name)
    if hasattr(nn.ModuleDict(), name) or hasattr(model, shared_name(name)):
        problem = "this cannot be an adapter's name, as modules have an attribute of that name"
        raise InputError(problem, value=name)


def own_copies(
    model: nn.Module,
    method: Adapter,
    shared: SharedFactors,
    copied: Copied,
    layers: list[AdapterLayer],
) -> list[AdapterLayer]:
    """Give an adapter its copies: its layers theirs, and others, which are returned."""
    there, more = {layer.site.name: layer for layer in layers}, list[AdapterLayer]()
    for path, leaves in copied.items():
        if path not in there:
            there[path] = CopiesLayer(method, Site(path, "module", 0, 0), shared)
            more.append(there[path])
        for leaf in leaves:
            there[path].register_parameter(f"{COPY}{leaf}", empty_copy(model, path, leaf))
    return more


def check_has_sizes(model: nn.Module) -> None:
    """Make sure that every parameter can be frozen.

    Raises:
        InputError: one is of a lazy module that has not run yet.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise InputError("it has no sizes yet: run the model once before", value=name)


def check_numbers(method: Adapter, sites: Iterable[Site]) -> None:
    """Make sure that products in fp32 can take the numbers of a method, and those of its layers.

    Raises:
        InputError: one is too large.
    """
    own = [("", method.model_dump()), *((site.name, site.prepared) for site in sites)]
    for name, numbers in own:
        for key, number in numbers.items():
            if isinstance(number, int | float) and abs(number) > _LARGEST:
                where = f" (of {name})" if name else ""
                problem = f"is above {_LARGEST:.2g}, the largest number of fp32{where}"
                raise InputError(problem, field=key, value=number)
