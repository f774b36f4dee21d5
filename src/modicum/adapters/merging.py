"""Folding an adapter into the base weights, and taking it out again."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from modicum.adapters import base_weights
from modicum.adapters.adapted_layer import exchange
from modicum.adapters.attachment import Attachment
from modicum.adapters.base import AdapterLayer
from modicum.adapters.rewriting import RewritingLayer
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
        for other in attached.model.get_submodule(name).modules():
            if isinstance(other, RewritingLayer) and other.rewrote and other is not layer:
                raise InputError(
                    f"{other.method.info.name} has taken a part out of the base weight; merge or "
                    "detach that adapter first",
                    value=name,
                )
    for name, layer in attached.layers():
        base = bases[name]
        weight = merged_weight(base, layer)
        if name in inexact:
            assert dense is not None
            before.layers[name] = base
            exchange(attached.model, name, _dense(base, weight, dense))
        else:
            own = dict(base.named_parameters(recurse=False))
            if any(parameter.dtype != torch.float32 for parameter in own.values()):
                # In low precision w + d - d is not w, so unmerging needs the weight as it was.
                before.tensors[name] = {
                    key: own_part(value.detach())[0].to("cpu", copy=True)
                    for key, value in own.items()
                }
            base_weights.write(base, layer.site, weight)
        now = attached.model.get_submodule(name)
        if any(parameter.dtype.itemsize < 4 for parameter in now.parameters(recurse=False)):
            error = (base_weights.read(now, layer.site) - weight).norm()
            change = whole(layer.delta()).norm()
            before.rounding[name] = float(error / change) if change else 0.0
        layer.merged = True
        if isinstance(layer, RewritingLayer):
            layer.rewrote = False
    _tell(before.rounding)
    return before


def _tell(rounding: dict[str, float]) -> None:
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
        base = attached.model.get_submodule(name)
        if name in before.layers:
            exchange(attached.model, name, before.layers[name])
        elif name in before.tensors:
            for key, value in before.tensors[name].items():
                own_part(base.get_parameter(key).detach())[0].copy_(value)
        else:
            rest = base_weights.read(base, layer.site) - whole(layer.delta())
            if isinstance(layer, RewritingLayer):
                rest = rest - layer.taken()
            base_weights.write(base, layer.site, rest)
        layer.merged = False
        if isinstance(layer, RewritingLayer):
            layer.rewrote = True


@torch.no_grad()
def merged_weight(base: nn.Module, layer: AdapterLayer) -> Tensor:
    """The weight that a layer and its adapter represent together: [out, in], unsharded."""
    weight = base_weights.read(base, layer.site) + whole(layer.delta())
    if isinstance(layer, RewritingLayer) and layer.rewrote:
        weight = weight + layer.taken()
    return weight


def _dense(base: nn.Module, weight: Tensor, dtype: torch.dtype) -> nn.Module:
    """A frozen `nn.Linear` of this weight, with the base layer's bias."""
    bias = getattr(base, "bias", None)
    bias = bias.detach().to(dtype) if isinstance(bias, Tensor) else None
    made = DENSE.from_dense(weight.to(dtype), bias)
    return made.requires_grad_(False).train(base.training)


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
