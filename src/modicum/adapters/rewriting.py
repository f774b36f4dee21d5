"""Adapters that take their first values out of the frozen weight, which keeps the residual.

W is the weight as the model's file has it. Whatever happens, W can be had again: read anew
where a reader was given, and else put together from the residual and what was taken out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from modicum.adapters import base_weights
from modicum.adapters.attachment import Attachment
from modicum.adapters.base import AdapterLayer, Generated, ReadWeight
from modicum.adapters.deriving import check_derivable
from modicum.adapters.deriving_layer import DerivingLayer
from modicum.adapters.patching_layer import PatchingLayer
from modicum.adapters.slices import layer_name
from modicum.core.errors import InputError
from modicum.core.layers.linear_forms import form_of
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.turns import by_turns


def check_base(model: nn.Module, layers: Iterable[AdapterLayer], *, readable: bool) -> None:
    """Make sure that base weights can be rewritten, before layers that do so are put on them.

    Raises:
        InputError: another adapter has rewritten one, or has a patch of it; one is of a form that
            no other weight can be written into; or one is quantized, and `readable` says that
            nobody gives the full-precision weight.
    """
    for layer in layers:
        there = model.get_submodule(layer_name(layer.site))
        if isinstance(layer, DerivingLayer) and not (readable or layer.of_held):
            check_derivable(layer.site.name, there)
        if not layer.rewrites:
            continue
        if any(getattr(module, "rewrites", False) for module in there.modules()):
            raise InputError(
                "another adapter has replaced the base weight already, and only one can; save that "
                "one as a PEFT LoRA for the original model, and load it here",
                value=layer.site.name,
            )
        if any(isinstance(module, PatchingLayer) for module in there.modules()):
            raise InputError(
                "another adapter has a patch of the weight of which this one would take a part; "
                "merge or detach that one first",
                value=layer.site.name,
            )
        form = form_of(there)
        if form is not None and form.write is None:
            raise InputError(
                f"its base is {form.name}, which cannot hold the residual of a weight; exclude it",
                value=layer.site.name,
            )
        if not readable:
            _check_readable(there, layer.site.name)


def check_readable(attached: Attachment, weights: ReadWeight | None) -> None:
    """Make sure that an adapter's base weights can be rewritten anew, before any is put back.

    Args:
        weights: gives the full-precision weight of a layer by its name; None: the layer's own.

    Raises:
        InputError: one is quantized, and nobody gives the full-precision weight.
    """
    for name in rewriting(attached) if weights is None else ():
        _check_readable(attached.model.get_submodule(name), name)


def _check_readable(base: nn.Module, name: str) -> None:
    if not base_weights.is_exact(base):
        raise InputError(
            "its base is quantized, and the adapter starts from the full-precision weight; give "
            "`weights`, a function from a layer's name to its weight in the model's file",
            value=name,
        )


@torch.no_grad()
def rewrite(attached: Attachment, kept: Mapping[str, Tensor] | None, ranks: Ranks | None) -> None:
    """Split the base weights of all layers that want it, and leave the residuals in them.

    Ranks share the splitting, each takes every so many-th layer, and send each other what came out:
    so they agree to the bit. Without `ranks` each process does all of it, and agrees as far as its
    arithmetic does.

    Raises:
        InputError: `kept` is of another adapter; or a base is quantized, and nobody gives the
            full-precision weight.
    """
    ranks = ranks or Ranks()
    layers = rewriting(attached)
    check_readable(attached, attached.weights)
    if kept is not None:
        for name, layer in layers.items():
            layer.put(_kept(attached, name, layer, kept))
    else:
        _split(attached, layers, ranks)
    for name, layer in layers.items():
        base = attached.model.get_submodule(name)
        base_weights.write(base, layer.site, original_weight(attached, name) - layer.taken())
        layer.rewrote = True


@torch.no_grad()
def restore(attached: Attachment) -> None:
    """Put the original weights back into the base layers."""
    for name, layer in rewriting(attached).items():
        if layer.rewrote:
            base = attached.model.get_submodule(name)
            base_weights.write(base, layer.site, original_weight(attached, name))
            layer.rewrote = False


def original_weight(attached: Attachment, name: str) -> Tensor:
    """W of a layer: [out, in], unsharded; every rank calls this where ranks hold parts of it.

    Raises:
        InputError: the reader gives another shape.
    """
    base, site = attached.model.get_submodule(name), attached.sites[name]
    layer = rewriting(attached)[name]
    if attached.weights is None:
        rest = base_weights.read(base, site)
        return rest + layer.taken() if layer.rewrote else rest
    return base_weights.given(attached.weights, site, base)


def differs(attached: Attachment, state: Mapping[str, Tensor]) -> bool:
    """Whether a state of the adapter says that something else was taken out of the base weights."""
    return any(
        not torch.equal(value, state[f"{name}.{key}"].to(value))
        for name, layer in rewriting(attached).items()
        for key, value in layer.kept_buffers()
        if layer.rewrote
    )


def rewriting(attached: Attachment) -> dict[str, AdapterLayer]:
    """The layers of an adapter that rewrite their base, by their sites' names."""
    return {name: layer for name, layer in attached.layers() if layer.rewrites}


def _split(attached: Attachment, layers: Mapping[str, AdapterLayer], ranks: Ranks) -> None:
    """Split each layer's weight, by one rank, and start its factors from what came out."""

    def read(name: str, mine: bool) -> Tensor | None:
        # A weight that is sharded over ranks is gathered by all; a reader gives it to who asks.
        return original_weight(attached, name) if mine or attached.weights is None else None

    def make(name: str, weight: Tensor) -> Mapping[str, Tensor]:
        base_weights.check_finite(weight, name)
        return layers[name].split(
            weight,
            partial(base_weights.round_trip, attached.model.get_submodule(name)),
            seed=attached.seed,
            name=f"{attached.name}/{name}",
        )

    for name, values in by_turns(list(layers), make, ranks, read=read):
        layers[name].put(values)


def _kept(
    attached: Attachment, name: str, layer: AdapterLayer, kept: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The frozen tensors of a layer, which a checkpoint keeps under the model's names."""
    found: dict[str, Tensor] = {}
    for key, factor in attached.method.frozen(layer.site).items():
        if isinstance(factor, Generated):
            continue
        full = f"{name}.layers_by_adapter.{attached.name}.{key}"
        if full not in kept or tuple(kept[full].shape) != factor.shape:
            raise InputError("this adapter's first values are not there", field=full)
        found[key] = kept[full]
    return found
