"""An adapter on a model, as data: what merging, rewriting and files need to know of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn

from modicum.adapters.base import Adapter, AdapterLayer, ReadWeight, SharedFactors
from modicum.adapters.preparation import Preparation
from modicum.adapters.sites import Site, shared_name


@dataclass
class Attachment:
    """Which adapter is on which layers of a model.

    Args:
        name: what the model calls the adapter.
        seed: what it was, or will be, started from.
        sites: the layers that have it, by their names in the model.
        shared: the factors that the layers have in common.
        weights: gives the full-precision weight of a layer by its name; None: the layer's own.
        prepared: what the method found out from data; its values are in the sites too.
    """

    model: nn.Module
    method: Adapter
    name: str
    seed: int
    sites: dict[str, Site]
    shared: SharedFactors
    weights: ReadWeight | None = None
    prepared: Preparation = field(default_factory=Preparation)

    def layers(self) -> Iterator[tuple[str, AdapterLayer]]:
        """Pairs of a site's name and the adapter's layer there."""
        for name in self.sites:
            layer = self.model.get_submodule(f"{name}.layers_by_adapter.{self.name}")
            assert isinstance(layer, AdapterLayer)
            yield name, layer

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What is trained, by `site.factor`, and `shared.factor` for what sites share."""
        for site, layer in self.layers():
            yield from ((f"{site}.{key}", value) for key, value in layer.named_parameters())
        for key, value in self.shared.named_parameters():
            yield f"shared.{key}", value

    def parameters(self) -> Iterator[nn.Parameter]:
        """The adapter's trained tensors, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, Tensor]:
        """Every tensor of the adapter: the trained ones, and by `site.name` those that are not."""
        state = {name: parameter.detach() for name, parameter in self.named_parameters()}
        for site, layer in self.layers():
            state |= {f"{site}.{key}": value for key, value in layer.named_buffers()}
        return state

    def model_name(self, name: str) -> str:
        """The model's name of a tensor of `state_dict`."""
        owner, _, key = name.rpartition(".")
        if owner == "shared":
            return f"{shared_name(self.name)}.{key}"
        return f"{owner}.layers_by_adapter.{self.name}.{key}"
