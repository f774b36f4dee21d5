"""Which adapters of a layer are applied, and in which order."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from modicum.adapters.adapted_layer import AdaptedLayer, train_active, wearers
from modicum.adapters.attachment import Attachment
from modicum.adapters.base import AdapterLayer
from modicum.adapters.patching_layer import PatchingLayer
from modicum.core.errors import InputError


def in_order(adapted: AdaptedLayer, names: tuple[str, ...]) -> tuple[str, ...]:
    """The adapters `names` of a layer as they are applied: as given, but `applies_first` first.

    Raises:
        InputError: two are to be the first, or another has taken a part out of the weight that the
            first one reads, or writes into the weight that one reads.
    """
    layers = {name: adapted.layers_by_adapter[name] for name in names}
    first = [
        name
        for name, layer in layers.items()
        if isinstance(layer, AdapterLayer) and "applies_first" in layer.method.traits
    ]
    _check_patches(layers)
    if not first:
        return names
    layer = layers[first[0]]
    assert isinstance(layer, AdapterLayer)
    reads, rewriter = f"{layer.method.info.name} reads the layer's own weight", adapted.rewriter()
    if len(first) > 1:
        problem = f"{reads}, and so does {first[1]}, which is active; merge or deactivate that one"
        raise InputError(problem, value=layer.site.name)
    if rewriter is not None:
        problem = f"{reads}, of which {rewriter.method.info.name} has taken a part; detach that one"
        raise InputError(problem, value=layer.site.name)
    return (*first, *(name for name in names if name not in first))


def apply(attached: Attachment, *, alone: bool, merged: bool) -> None:
    """Have a model use and train an adapter; with `alone`, and no other.

    Args:
        merged: whether it is in the weights, so that layers need not compute it.

    Raises:
        InputError: as `in_order`; then nothing was changed.
    """
    name, orders = attached.name, []
    # On a part of the model another may have the same name; modules may have been wrapped since.
    layers = {layer for _, layer in attached.everywhere()}
    for _, module in wearers(attached.model):
        there = module.layers_by_adapter
        own = (name,) if name in there and there[name] in layers else ()
        kept = () if alone else tuple(each for each in module.active if each not in own)
        orders.append((module, in_order(module, kept if merged else kept + own)))
    for module, order in orders:
        module.active = order
    train_active(attached.model)


def _check_patches(layers: Mapping[str, nn.Module]) -> None:
    """Make sure that no adapter reads the weight without what another one writes into it.

    Raises:
        InputError: one does.
    """
    patch = next((x for x in layers.values() if isinstance(x, PatchingLayer)), None)
    if patch is None:
        return
    for layer in layers.values():
        assert isinstance(layer, AdapterLayer)
        if "reads_base" in layer.method.traits:
            raise InputError(
                f"{layer.method.info.name} reads the layer's own weight, into which "
                f"{patch.method.info.name} writes; merge or deactivate one of them",
                value=layer.site.name,
            )
