"""Whether an adapter that is on a model can take a state of another, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from modicum.adapters.adapter_layer import check_state
from modicum.adapters.attachment import Attachment
from modicum.adapters.deriving_layer import DerivingLayer
from modicum.adapters.patching_layer import INDICES, PatchingLayer
from modicum.adapters.rewriting import check_readable, differs


def check_takes(attached: Attachment, state: Mapping[str, Tensor]) -> None:
    """Make sure that a state can be put into an adapter.

    Args:
        state: by the names of `Attachment.state_dict`.

    Raises:
        InputError: names or shapes are others than the adapter's; what it derives from the base
            weights, or a layer, is not what the state is for; or something else was taken out of a
            quantized base, and nobody gives the full-precision weight.
    """
    check_state(attached.state_dict(), state)
    for site, layer in attached.layers():
        if isinstance(layer, DerivingLayer):
            layer.check_fingerprint(state.get(f"{site}.fingerprint"))
        if isinstance(layer, PatchingLayer):
            layer.check_state(state.get(f"{site}.{INDICES}"))
    for site, layer in attached.everywhere():
        layer.check_kept({key: state[f"{site}.{key}"] for key, _ in layer.kept_buffers()})
    if differs(attached, state):
        check_readable(attached, attached.weights)
