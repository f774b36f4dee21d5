"""Layers that wear adapters, in the place of the layers that they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modicum.adapters.rewriting import RewritingLayer
from modicum.adapters.sites import Site, base_of, replace


class AdaptedLayer(nn.Module):
    """A layer that wears adapters: `adapted_base` is the layer, frozen, under its own weights.

    Active adapters apply one after the other, each to what the ones before it make of the layer.
    One that took its start out of the base weight gives that back as long as it is not active.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.adapted_base = base
        self.layers_by_adapter = nn.ModuleDict()
        self.active: tuple[str, ...] = ()
        self.train(base.training)

    def forward(self, inputs: Tensor) -> Tensor:
        run: Callable[[Tensor], Tensor] = self.adapted_base
        for name, layer in self.layers_by_adapter.items():
            if isinstance(layer, RewritingLayer) and layer.rewrote and name not in self.active:
                run = partial(layer.original, base=run)
        for name in self.active:
            run = partial(self.layers_by_adapter[name], base=run)
        return run(inputs)

    def __getattr__(self, name: str) -> Any:
        # Code around the model asks a linear layer for `weight`, `in_features` and the like.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("adapted_base"), name)


def wearers(model: nn.Module) -> Iterator[AdaptedLayer]:
    """Every layer that wears adapters."""
    return (module for module in model.modules() if isinstance(module, AdaptedLayer))


def worn(model: nn.Module) -> set[str]:
    """The names of all adapters on a model."""
    return {name for module in wearers(model) for name in module.layers_by_adapter}


def wear(model: nn.Module, name: str) -> AdaptedLayer:
    """The layer `name` as one that wears adapters, which it may be already."""
    module = model.get_submodule(name)
    if not isinstance(module, AdaptedLayer):
        module = AdaptedLayer(module)
        replace(model, name, module)
    return module


def shared_name(name: str) -> str:
    """Under which name a model owns what the sites of the adapter `name` share."""
    return f"shared_by_{name}"


def train_active(model: nn.Module) -> None:
    """Have the tensors of active adapters trained, and those of others not."""
    active = set()
    for module in wearers(model):
        active |= set(module.active)
        for name, layer in module.layers_by_adapter.items():
            layer.requires_grad_(name in module.active)
    owned = {shared_name(name): name for name in worn(model)}
    for child, shared in model.named_children():
        if child in owned:
            shared.requires_grad_(owned[child] in active)


def device_of(model: nn.Module, site: Site) -> torch.device:
    """Where the weight of a layer is."""
    return next(base_of(model, site.name).parameters()).device
