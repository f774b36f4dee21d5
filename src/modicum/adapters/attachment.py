"""An adapter on a model, as data: what merging, rewriting and files need to know of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn

from modicum.adapters.base import Adapter, AdapterLayer, ReadWeight, SharedFactors
from modicum.adapters.copies import Copied
from modicum.adapters.factors import FrozenBuffers
from modicum.adapters.preparation import Preparation
from modicum.adapters.sites import Site, shared_name
from modicum.core.ranks.ranks import Ranks


@dataclass
class Attachment:
    """Which adapter is on which layers of a model.

    Args:
        name: what the model calls the adapter.
        seed: what it was, or will be, started from.
        sites: the layers that have it, by their names in the model.
        shared: the factors that the layers have in common.
        copied: by module, the parameters of which the adapter has copies.
        weights: gives the full-precision weight of a layer by its name; None: the layer's own.
        prepared: what the method found out from data; its values are in the sites too.
        ranks: this process among those of a run; None: nobody has said it.
    """

    model: nn.Module
    method: Adapter
    name: str
    seed: int
    sites: dict[str, Site]
    shared: SharedFactors
    copied: Copied = field(default_factory=dict)
    weights: ReadWeight | None = None
    prepared: Preparation = field(default_factory=Preparation)
    ranks: Ranks | None = None

    def layers(self) -> Iterator[tuple[str, AdapterLayer]]:
        """Pairs of a site's name and the adapter's layer there."""
        return ((name, self._layer(name)) for name in self.sites)

    def everywhere(self) -> Iterator[tuple[str, AdapterLayer]]:
        """The same, and of modules of which it has copies alone."""
        return ((name, self._layer(name)) for name in dict.fromkeys([*self.sites, *self.copied]))

    def _layer(self, name: str) -> AdapterLayer:
        layer = self.model.get_submodule(f"{name}.layers_by_adapter.{self.name}")
        assert isinstance(layer, AdapterLayer)
        return layer

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What is trained, by `site.factor`, and `shared.factor` for what sites share."""
        for site, layer in self.everywhere():
            yield from ((f"{site}.{key}", value) for key, value in layer.named_parameters())
        for key, value in self.shared.named_parameters():
            yield f"shared.{key}", value

    def parameters(self) -> Iterator[nn.Parameter]:
        """The adapter's trained tensors, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def modules(self) -> Iterator[tuple[str, FrozenBuffers]]:
        """What owns the adapter's tensors: pairs of what `state_dict` calls it, and the module."""
        yield "shared", self.shared
        yield from self.everywhere()

    def plan_for(self, positions: int) -> None:
        """Have layers choose how to compute by so many positions, whatever a batch has."""
        for _, layer in self.layers():
            layer.planned_positions = positions

    def state_dict(self) -> dict[str, Tensor]:
        """Every tensor of the adapter that is kept: trained ones, and by `site.name` the others."""
        state = {name: parameter.detach() for name, parameter in self.named_parameters()}
        for site, layer in self.everywhere():
            state |= {f"{site}.{key}": value for key, value in layer.kept_buffers()}
        return state | {f"shared.{key}": value for key, value in self.shared.kept_buffers()}

    def model_name(self, name: str) -> str:
        """The model's name of a tensor of `state_dict`."""
        owner, _, key = name.rpartition(".")
        if owner == "shared":
            return f"{shared_name(self.name)}.{key}"
        return f"{owner}.layers_by_adapter.{self.name}.{key}"
