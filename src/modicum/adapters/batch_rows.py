"""Batches whose rows use different adapters: `with adapter_names(model, [...])`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from modicum.adapters.adapted_layer import wearers, worn
from modicum.adapters.base import AdapterLayer
from modicum.adapters.row_groups import RowGroups, check_names
from modicum.core.errors import InputError


@contextmanager
def adapter_names(model: nn.Module, names: Sequence[str | None]) -> Iterator[None]:
    """Row i of each batch uses the adapter `names[i]`, and no other; None: the plain model.

    Each row is what it would be alone. Which adapters are active does not matter in here, and is
    the same again afterwards. Layers without copies or entries of their own run once for all rows.
    A backward pass that computes blocks again has to run in here too.

    Args:
        model: with adapters of any methods.
        names: one for each row of the batches, which is their first dimension.

    Raises:
        InputError: a name is no adapter's; an adapter is merged, so no row is without it; a batch
            has another number of rows; or a module that takes several tensors has copies of
            parameters.

    >>> import torch
    >>> from modicum.adapters import LoRA
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    >>> adapters = [LoRA(rank=1).attach(model, name=name) for name in ("law", "code")]
    >>> with adapter_names(model, ["code", None, "law"]):
    ...     outputs = model(torch.ones(3, 4))
    """
    check_names(names, worn(model))
    layers = [module for _, module in wearers(model)]
    for layer in layers:
        for name, each in layer.layers_by_adapter.items():
            if isinstance(each, AdapterLayer) and each.merged:
                problem = "is merged into the weights, so every row would have it; unmerge it first"
                raise InputError(problem, value=name)
    before = [(layer, layer.active) for layer in layers]
    groups = RowGroups(tuple(names))
    try:
        for layer in layers:
            layer.active = tuple(name for name in layer.layers_by_adapter if name in groups.names)
            layer.__dict__["row_groups"] = groups
        yield
    finally:
        for layer, active in before:
            layer.active = active
            layer.__dict__.pop("row_groups", None)
