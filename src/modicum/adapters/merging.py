"""Folding an adapter into the base weights, and taking it out again."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from modicum.adapters import base_weights
from modicum.adapters.adapted_layer import AdaptedLayer, exchange
from modicum.adapters.attachment import Attachment
from modicum.adapters.base import AdapterLayer, LayerChange
from modicum.adapters.deriving_layer import DerivingLayer
from modicum.adapters.merged import Merged
from modicum.adapters.merging_marks import check_unchanged, mark
from modicum.adapters.merging_patches import merge_patch, unmerge_patch
from modicum.adapters.merging_slices import (
    check_alone,
    check_no_bias,
    merge_slice,
    unmerge_slice,
    unmerged,
)
from modicum.adapters.patching_layer import PatchingLayer
from modicum.adapters.slices import holder
from modicum.core.errors import InputError
from modicum.core.layers.linear_forms import form_of
from modicum.core.ranks.sharding import is_sharded, own_part, whole

_SUMS = 1e-6  # of a weight's norm: what sums in fp32 round


class RoundingWarning(UserWarning):
    """Merged weights were rounded to a low precision, and by how much."""


@torch.no_grad()
def merge(attached: Attachment, dense: torch.dtype | None) -> Merged:
    """Fold an adapter into the base weights; see `AttachedAdapter.merge`."""
    before = Merged()
    bases = {name: attached.model.get_submodule(name) for name in attached.sites}
    inexact = [name for name, base in bases.items() if not base_weights.is_exact(base)]
    for name, layer in attached.layers():
        _check_may_merge(attached, bases[name], layer)
    shifts = {n: _shifted(bases[n], layer) for n, layer in attached.layers() if n in inexact}
    for name, layer in attached.layers():
        if name in shifts and shifts[name] is None:
            _check_may_be_dense(name, bases[name], dense, layer.tile)
    for name, layer in attached.everywhere():
        _check_copies_may_merge(attached, attached.model.get_submodule(name), layer)
    try:
        for name, layer in attached.everywhere():
            before.copied[name] = _put(attached.model.get_submodule(name), layer.used_copies())
            layer.merged = name not in attached.sites
        for name, layer in attached.layers():
            shift = shifts.get(name)
            if shift is not None:
                _shift_one(bases[name], layer, shift, before)
            else:
                _merge_one(attached, bases[name], layer, dense if name in shifts else None, before)
    except BaseException:
        unmerge(attached, before)
        raise
    mark(attached, before)
    _renew(attached)
    _warn_of(before.rounding)
    return before


def _merge_one(
    attached: Attachment,
    base: nn.Module,
    layer: AdapterLayer,
    dense: torch.dtype | None,
    before: Merged,
) -> None:
    """Fold an adapter into one layer, which becomes a new one if `dense` says of which dtype."""
    if isinstance(layer, PatchingLayer):
        merge_patch(base, layer, before)
        return
    name = layer.site.name
    weight, change = merged_map(unmerged(base, layer.site, before.layers), layer)
    bias = _sum(base_weights.read_bias(base), change.bias)
    if layer.site.rows is not None:
        check_no_bias(layer.site, change)
        held = merge_slice(attached.model, layer.site, weight, dense, before.layers)
        before.slices[name] = held
    elif dense is not None:
        before.layers[name] = base
        made = base_weights.dense_layer(weight, bias, dense)
        exchange(attached.model, name, made.train(base.training))
    else:
        own = dict(base.named_parameters(recurse=False))
        exact = all(parameter.dtype == torch.float32 for parameter in own.values())
        if not exact or change.bias is not None or "reads_base" in attached.method.traits:
            # In low precision w + d - d is not w; and d may be of the weight as it was.
            before.tensors[name] = {
                key: own_part(value.detach())[0].to("cpu", copy=True) for key, value in own.items()
            }
        if change.bias is not None:
            assert bias is not None
            base_weights.write_bias(base, bias)
        base_weights.write(base, layer.site, weight)
    now = attached.model.get_submodule(name)
    low = any(p.dtype.itemsize < 4 for p in holder(now).parameters(recurse=False))
    if low and change.weight is not None:
        error, size = (base_weights.read(now, layer.site) - weight).norm(), change.weight.norm()
        before.rounding[name] = float(error / size) if size else 0.0
    layer.merged, layer.rewrote = True, False


def _shifted(base: nn.Module, layer: AdapterLayer) -> Mapping[str, Tensor] | None:
    """What a layer's tensors become that take its adapter's change without loss; None: they cannot.

    It is asked before anything is changed, so that a refused merge leaves the model as it was.
    """
    return None if layer.rewrote else base_weights.shifted(base, merged_map(base, layer)[1])


def _shift_one(
    base: nn.Module, layer: AdapterLayer, shift: Mapping[str, Tensor], before: Merged
) -> None:
    """Put new values into those tensors of a layer that take its adapter's change."""
    name, parts = layer.site.name, dict(base.named_parameters(recurse=False))
    weight, change = merged_map(base, layer)
    kept = [key for key in parts if key in shift or key == "bias"]
    held = {key: own_part(parts[key].detach())[0] for key in kept}
    before.tensors[name] = {key: part.to("cpu", copy=True) for key, part in held.items()}
    for key, value in shift.items():
        held[key].copy_(value)
    error = (base_weights.read(base, layer.site) - weight).norm()
    if change.weight is not None and error > _SUMS * weight.norm():
        before.rounding[name] = float(error / change.weight.norm())
    layer.merged = True


def _renew(attached: Attachment) -> None:
    """Have what adapters derived from weights that are others now derived again."""
    for name, site in attached.sites.items():
        base = attached.model.get_submodule(name)
        layers = [module for module in base.modules() if isinstance(module, DerivingLayer)]
        if any(layer.of_held for layer in layers):
            weight = base_weights.read(base, site)
            for layer in layers:
                layer.weight_changed(weight)


def _warn_of(rounding: dict[str, float]) -> None:
    """Warn of the largest rounding error, if weights were rounded at all."""
    worst = max(rounding, key=rounding.__getitem__, default="")
    if worst and rounding[worst]:
        warnings.warn(
            f"merged weights were rounded to a low precision: the error is up to "
            f"{rounding[worst]:.2g} of the adapter's own change (in {worst}); merge into fp32 "
            "weights, or keep the adapter unmerged, where that matters",
            RoundingWarning,
            stacklevel=5,  # who called `AttachedAdapter.merge`
        )


@torch.no_grad()
def unmerge(attached: Attachment, before: Merged) -> None:
    """Take a merged adapter out of the base weights again.

    Raises:
        InputError: what a layer held before would be put back, and it was changed after the merge.
    """
    check_unchanged(attached, before)
    for name, layer in attached.layers():
        if not layer.merged:
            continue
        base = attached.model.get_submodule(name)
        if isinstance(layer, PatchingLayer):
            unmerge_patch(base, layer, before)
        elif name in before.slices:
            unmerge_slice(attached.model, layer.site, before.slices[name], before.layers)
        elif name in before.layers:
            exchange(attached.model, name, before.layers[name])
        elif name in before.tensors:
            for key, value in before.tensors[name].items():
                own_part(base.get_parameter(key).detach())[0].copy_(value)
            if "bias" not in before.tensors[name] and "bias" in base._parameters:
                base.register_parameter("bias", None)
        else:
            merged = base_weights.read(base, layer.site) - layer.weighting * whole(layer.delta())
            base_weights.write(base, layer.site, merged - layer.taken())
        layer.merged, layer.rewrote = False, layer.rewrites
    for name, layer in attached.everywhere():
        _put(attached.model.get_submodule(name), before.copied.get(name, {}))
        layer.merged = False
    _renew(attached)


def _put(base: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Set parameters of a layer, and return what a rank had of them, in host memory."""
    before = {}
    for leaf, tensor in tensors.items():
        part, _ = own_part(base.get_parameter(leaf).detach())
        before[leaf] = part.to("cpu", copy=True)
        part.copy_(own_part(tensor.detach())[0])
    return before


@torch.no_grad()
def merged_map(base: nn.Module, layer: AdapterLayer) -> tuple[Tensor, LayerChange]:
    """The weight [out, in] that a layer and its adapter represent together, unsharded.

    With it comes the change, whose bias is not added to anything yet.
    """
    weight = base_weights.read(base, layer.site)
    if layer.rewrote:
        weight = weight + layer.taken()
    change = layer.change(weight, base_weights.read_bias(base))
    assert change is not None
    parts = (change.weight, change.bias)
    gathered = [None if part is None else layer.weighting * whole(part) for part in parts]
    merged = _sum(weight, gathered[0])
    assert merged is not None
    return merged, LayerChange(*gathered)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """What there is of the two, added up."""
    return one if other is None else other if one is None else one + other


def _check_may_merge(attached: Attachment, base: nn.Module, layer: AdapterLayer) -> None:
    """Make sure that an adapter has a dense form on a layer, and that other adapters allow it.

    Raises:
        InputError: it has none; another has taken a part out of the weight; or one that is applied
            before it is in the way.
    """
    method, name = attached.method, layer.site.name
    dense = "mergeable" in method.traits
    if dense and type(layer).change is not AdapterLayer.change:
        weight, bias = base_weights.read(base, layer.site), base_weights.read_bias(base)
        dense = layer.change(weight, bias) is not None
    if not dense:
        raise InputError(
            f"{method.info.name} has no dense form here, so it cannot be merged; keep it on the "
            "model, and save it with adapter.save(folder)",
            value=name,
        )
    for other in base.modules():
        if isinstance(other, AdapterLayer) and other.rewrote and other is not layer:
            raise InputError(
                f"{other.method.info.name} has taken a part out of the base weight; merge or "
                "detach that adapter first",
                value=name,
            )
    earlier = list(itertools.takewhile(lambda one: one != attached.name, _active(base)))
    before = [base.get_submodule(f"layers_by_adapter.{one}") for one in earlier]
    methods = [method, *(one.method for one in before if isinstance(one, AdapterLayer))]
    if before and any("reads_base" in one.traits for one in methods):
        raise InputError(
            f"the adapter {earlier[0]} is applied before it, and the change of one depends on the "
            "weight that it finds; merge that one first",
            value=name,
        )


def _check_copies_may_merge(attached: Attachment, base: nn.Module, layer: AdapterLayer) -> None:
    """Make sure that no adapter which is applied before it has copies of the same parameters.

    Raises:
        InputError: one has, which would be in use again when these are in the base.
    """
    for one in itertools.takewhile(lambda name: name != attached.name, _active(base)):
        other = base.get_submodule(f"layers_by_adapter.{one}")
        assert isinstance(other, AdapterLayer)
        if both := other.copies().keys() & layer.copies().keys():
            raise InputError(
                f"the adapter {one} has a copy of it too, which would be in use again; merge that "
                "one first",
                value=f"{layer.site.name}.{min(both)}",
            )


def _active(base: nn.Module) -> tuple[str, ...]:
    """The adapters of a layer that are applied, in their order."""
    assert isinstance(base, AdaptedLayer)
    return base.active


def _check_may_be_dense(
    name: str, base: nn.Module, dense: torch.dtype | None, tile: tuple[int, int] | None
) -> None:
    form = form_of(holder(base))
    assert form is not None
    check_alone(name, base)
    if dense is None:
        takes = "" if tile is None else f"; one in tiles of {tile[0]} x {tile[1]} could take it"
        raise InputError(
            f"a merged weight cannot be kept as {form.name} without losing a part of what was "
            f"learned{takes}; merge(dense=torch.bfloat16) makes these layers dense, or leave the "
            "adapter unmerged and save it",
            value=name,
        )
    if any(is_sharded(parameter) for parameter in holder(base).parameters(recurse=False)):
        raise InputError(
            "a layer sharded over ranks cannot be replaced by a dense one; save the adapter, "
            "and load and merge it in one process",
            value=name,
        )
