"""An adapter that sits on a model: the runtime that owns its factors.

Merging, switching, detaching and files work alike for every method, because a method's layer says
which change of the weight it amounts to (`delta`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from modicum.adapters.base import AdapterLayer
from modicum.adapters.sites import Site, base_name, base_of, choose
from modicum.core.errors import InputError

if TYPE_CHECKING:
    from modicum.adapters.base import Adapter


class AdaptedLayer(nn.Module):
    """A layer that wears adapters: `adapted_base` is the layer, frozen, under its own weights.

    Active adapters apply one after the other, each to what the ones before it make of the layer.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.adapted_base = base
        self.layers_by_adapter = nn.ModuleDict()
        self.active: tuple[str, ...] = ()
        self.train(base.training)

    def forward(self, inputs: Tensor) -> Tensor:
        run: Callable[[Tensor], Tensor] = self.adapted_base
        for name in self.active:
            run = partial(self.layers_by_adapter[name], base=run)
        return run(inputs)

    def __getattr__(self, name: str) -> Any:
        # Code around the model asks a linear layer for `weight`, `in_features` and the like.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("adapted_base"), name)


class AttachedAdapter:
    """The handle to an adapter on a model; `Adapter.attach` makes it.

    >>> import torch
    >>> from modicum.adapters import LoRA
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> adapter = LoRA(rank=2).attach(model)
    >>> sum(parameter.numel() for parameter in adapter.parameters())
    52
    >>> adapter.merge()
    >>> adapter.detach()
    >>> [type(module).__name__ for module in model]
    ['Linear', 'ReLU', 'Linear']
    """

    def __init__(self, model: nn.Module, method: Adapter, *, name: str, seed: int) -> None:
        if not name or "." in name:
            raise InputError("an adapter's name must not be empty or have a dot", value=name)
        if name in _names(model):
            raise InputError("an adapter of this name is attached already", value=name)
        self.model, self.method, self.name, self.seed = model, method, name, seed
        sites = choose(model, method.targets, method.exclude)
        first = not _names(model)
        self._frozen = {n for n, p in model.named_parameters() if p.requires_grad and first}
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        self.sites: dict[str, Site] = {site.name: site for site in sites}
        self._originals: dict[str, Tensor] = {}
        self.merged = False
        for site in sites:
            wearer = _wear(model, site.name)
            device = next(wearer.adapted_base.parameters()).device
            layer = method.layer(method, site, device=device)
            if device.type != "meta":
                layer.initialise(seed=seed, name=name)
            layer.train(wearer.training)
            wearer.layers_by_adapter[name] = layer
        self.activate()

    # Parameters and state

    def layers(self) -> Iterator[tuple[str, AdapterLayer]]:
        """Pairs of a site's name and the adapter's layer there."""
        for name in self.sites:
            layer = self._wearer(name).layers_by_adapter[self.name]
            assert isinstance(layer, AdapterLayer)
            yield name, layer

    def _wearer(self, name: str) -> AdaptedLayer:
        wearer = self.model.get_submodule(name)
        assert isinstance(wearer, AdaptedLayer)
        return wearer

    def parameters(self) -> Iterator[nn.Parameter]:
        """The adapter's trained tensors, for an optimizer."""
        for _, layer in self.layers():
            yield from layer.parameters()

    def state_dict(self) -> dict[str, Tensor]:
        """The factors by `site.factor`."""
        return {
            f"{site}.{key}": parameter.detach()
            for site, layer in self.layers()
            for key, parameter in layer.named_parameters()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put factors back.

        Raises:
            InputError: names or shapes are others than this adapter's.
        """
        own = self.state_dict()
        if own.keys() != state.keys():
            different = sorted(own.keys() ^ state.keys())[:3]
            raise InputError(f"these are not this adapter's factors; they differ in {different}")
        for name, tensor in own.items():
            if tensor.shape != state[name].shape:
                raise InputError(
                    f"has shape {tuple(state[name].shape)}, this adapter's {tuple(tensor.shape)}",
                    field=name,
                )
            tensor.copy_(state[name])

    def initialise(self) -> None:
        """Start the factors anew: for a model that was wrapped on meta and then materialised."""
        for _, layer in self.layers():
            layer.initialise(seed=self.seed, name=self.name)

    # Switching

    def activate(self, *, alone: bool = True) -> None:
        """Use and train this adapter; with `alone`, and no other on the same model."""
        for module in _wearers(self.model):
            kept = () if alone else tuple(name for name in module.active if name != self.name)
            worn = (self.name,) if self.name in module.layers_by_adapter else ()
            module.active = kept + (() if self.merged else worn)
            for name, layer in module.layers_by_adapter.items():
                layer.requires_grad_(name in module.active)

    def deactivate(self) -> None:
        """Leave the adapter on the model, unused and untrained."""
        for name, layer in self.layers():
            wearer = self._wearer(name)
            wearer.active = tuple(other for other in wearer.active if other != self.name)
            layer.requires_grad_(False)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The model without this adapter, for the length of a `with` block."""
        wearers = [self._wearer(name) for name in self.sites]
        before = [wearer.active for wearer in wearers]
        for wearer in wearers:
            wearer.active = tuple(other for other in wearer.active if other != self.name)
        try:
            yield
        finally:
            for wearer, active in zip(wearers, before, strict=True):
                wearer.active = active

    # Merging

    @torch.no_grad()
    def merge(self) -> None:
        """Fold the adapter into the base weights; summed in fp32, then cast to their dtype.

        Raises:
            InputError: it is merged already.
        """
        if self.merged:
            raise InputError("the adapter is merged already", value=self.name)
        for name, layer in self.layers():
            weight = base_of(self.model, name).weight
            assert isinstance(weight, Tensor)
            if weight.dtype != torch.float32:
                # In low precision w + d - d is not w, so unmerging needs the weight as it was.
                self._originals[name] = weight.detach().to("cpu", copy=True)
            weight.copy_(weight.float() + _oriented(layer))
        self.deactivate()
        self.merged = True

    @torch.no_grad()
    def unmerge(self) -> None:
        """Take a merged adapter out of the base weights and use it beside them again.

        Raises:
            InputError: it is not merged.
        """
        if not self.merged:
            raise InputError("the adapter is not merged", value=self.name)
        for name, layer in self.layers():
            weight = base_of(self.model, name).weight
            assert isinstance(weight, Tensor)
            original = self._originals.pop(name, None)
            weight.copy_(weight - _oriented(layer) if original is None else original)
        self.merged = False
        self.activate(alone=False)

    def detach(self) -> None:
        """Take the adapter off the model; layers without adapters become what they were.

        A merged adapter leaves its change in the weights. When the last adapter goes, the
        parameters that were trainable before the first came are trainable again.
        """
        for name in self.sites:
            wearer = self._wearer(name)
            wearer.active = tuple(other for other in wearer.active if other != self.name)
            del wearer.layers_by_adapter[self.name]
            if not wearer.layers_by_adapter:
                _replace(self.model, name, wearer.adapted_base)
        for name, parameter in self.model.named_parameters():
            if base_name(name) in self._frozen:
                parameter.requires_grad_(True)
        self.sites = {}

    close = detach

    # Files

    def save(
        self, folder: str | Path, *, base_model: str | None = None, write: bool = True
    ) -> None:
        """Write a PEFT folder (`adapter_config.json`, `adapter_model.safetensors`).

        Factors that are cut over ranks are gathered for it: every rank calls this, and one writes.

        Raises:
            InputError: the method is no exact LoRA, so PEFT's LoRA format cannot hold it.
        """
        from modicum.adapters.peft_files import save

        save(self, Path(folder), base_model=base_model, write=write)


def _names(model: nn.Module) -> set[str]:
    return {name for module in _wearers(model) for name in module.layers_by_adapter}


def _wearers(model: nn.Module) -> Iterator[AdaptedLayer]:
    return (module for module in model.modules() if isinstance(module, AdaptedLayer))


def _wear(model: nn.Module, name: str) -> AdaptedLayer:
    module = model.get_submodule(name)
    if not isinstance(module, AdaptedLayer):
        module = AdaptedLayer(module)
        _replace(model, name, module)
    return module


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _oriented(layer: AdapterLayer) -> Tensor:
    """The layer's delta in the orientation in which the base stores its weight."""
    delta = layer.delta()
    return delta.T if layer.site.transposed else delta
