"""Folding an adapter into the base weights, and taking it out again."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from modicum.adapters import base_weights
from modicum.adapters.adapted_layer import AdaptedLayer, exchange
from modicum.adapters.attachment import Attachment
from modicum.adapters.base import AdapterLayer, LayerChange
from modicum.core.errors import InputError
from modicum.core.layers.linear_forms import DENSE, form_of
from modicum.core.ranks.sharding import is_sharded, own_part, whole


class RoundingWarning(UserWarning):
    """Merged weights were rounded to a low precision, and by how much."""


@dataclass
class Merged:
    """What a merge replaced and sums cannot give back: low-precision weights or layers.

    `rounding` is, by layer that was rounded, the norm of the rounding error over that of the
    adapter's own change.
    """

    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    layers: dict[str, nn.Module] = field(default_factory=dict)
    rounding: dict[str, float] = field(default_factory=dict)


@torch.no_grad()
def merge(attached: Attachment, dense: torch.dtype | None) -> Merged:
    """Fold an adapter into the base weights; see `AttachedAdapter.merge`."""
    before = Merged()
    bases = {name: attached.model.get_submodule(name) for name in attached.sites}
    inexact = [name for name, base in bases.items() if not base_weights.is_exact(base)]
    for name in inexact:
        _check_may_be_dense(name, bases[name], dense)
    for name, layer in attached.layers():
        _check_may_merge(attached, bases[name], layer)
    try:
        for name, layer in attached.layers():
            _merge_one(attached, bases[name], layer, dense if name in inexact else None, before)
    except BaseException:
        unmerge(attached, before)
        raise
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
    name = layer.site.name
    weight, change = merged_map(base, layer)
    bias = _sum(base_weights.read_bias(base), change.bias)
    if dense is not None:
        before.layers[name] = base
        exchange(attached.model, name, _dense(weight, bias, dense).train(base.training))
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
    low = any(parameter.dtype.itemsize < 4 for parameter in now.parameters(recurse=False))
    if low and change.weight is not None:
        error, size = (base_weights.read(now, layer.site) - weight).norm(), change.weight.norm()
        before.rounding[name] = float(error / size) if size else 0.0
    layer.merged, layer.rewrote = True, False


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
    """Take a merged adapter out of the base weights again."""
    for name, layer in attached.layers():
        if not layer.merged:
            continue
        base = attached.model.get_submodule(name)
        if name in before.layers:
            exchange(attached.model, name, before.layers[name])
        elif name in before.tensors:
            for key, value in before.tensors[name].items():
                own_part(base.get_parameter(key).detach())[0].copy_(value)
            if "bias" not in before.tensors[name] and "bias" in base._parameters:
                base.register_parameter("bias", None)
        else:
            rest = base_weights.read(base, layer.site) - whole(layer.delta()) - layer.taken()
            base_weights.write(base, layer.site, rest)
        layer.merged, layer.rewrote = False, layer.rewrites


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
    gathered = [None if part is None else whole(part) for part in (change.weight, change.bias)]
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


def _active(base: nn.Module) -> tuple[str, ...]:
    """The adapters of a layer that are applied, in their order."""
    assert isinstance(base, AdaptedLayer)
    return base.active


def _dense(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> nn.Module:
    """A frozen `nn.Linear` of this weight and bias."""
    made = DENSE.from_dense(weight.to(dtype), None if bias is None else bias.to(dtype))
    return made.requires_grad_(False)


def _check_may_be_dense(name: str, base: nn.Module, dense: torch.dtype | None) -> None:
    form = form_of(base)
    assert form is not None
    if dense is None:
        raise InputError(
            f"a merged weight cannot be kept as {form.name} without losing a part of what was "
            "learned; merge(dense=torch.bfloat16) makes these layers dense, or leave the adapter "
            "unmerged and save it",
            value=name,
        )
    if any(is_sharded(parameter) for parameter in base.parameters(recurse=False)):
        raise InputError(
            "a layer sharded over ranks cannot be replaced by a dense one; save the adapter, "
            "and load and merge it in one process",
            value=name,
        )
