"""The order in which the active adapters of a layer are applied."""

from __future__ import annotations

from modicum.adapters.adapted_layer import AdaptedLayer
from modicum.adapters.base import AdapterLayer
from modicum.core.errors import InputError


def in_order(adapted: AdaptedLayer, names: tuple[str, ...]) -> tuple[str, ...]:
    """The adapters `names` of a layer as they are applied: as given, but `applies_first` first.

    Raises:
        InputError: two are to be the first, or another has taken a part out of the weight that the
            first one reads.
    """
    layers = {name: adapted.layers_by_adapter[name] for name in names}
    first = [
        name
        for name, layer in layers.items()
        if isinstance(layer, AdapterLayer) and "applies_first" in layer.method.traits
    ]
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
