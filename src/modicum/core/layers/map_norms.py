"""What a norm computes, tried on numbers, and what of it folds into the layers that read it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from modicum.core.layers.map_calls import NormCall, Trace
from modicum.core.layers.map_labels import Origin
from modicum.core.layers.map_parts import MappedNorm
from modicum.core.random import normal_

BATCH_NORMS = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
_EPSILON = ("eps", "epsilon", "variance_epsilon")


def norm_of(
    model: nn.Module, trace: Trace, call: NormCall, ties: Mapping[str, tuple[str, ...]]
) -> MappedNorm:
    """The norm that was called, and its readers."""
    module = model.get_submodule(call.module)
    named = [name for name, _ in module.named_parameters(recurse=False)]
    bias = next((name for name in named if "bias" in name), None)
    weight = next((name for name in named if name != bias), None)
    kind, offset = kind_of(module, weight, bias, call.shape)
    full = {n: f"{call.module}.{n}" if n else None for n in (weight or "", bias or "")}
    readers, kept = _readers(trace, call.origin, ties) if call.origin else ((), _PER_HEAD)
    if kind == "unknown":
        kept = "what it computes is not known"
    return MappedNorm(
        call.module, kind, full[weight or ""], full[bias or ""], offset, readers, kept,
        _writer(trace, call),
    )  # fmt: skip


_PER_HEAD = "it scales the channels of each head, which no linear layer reads as they are"


def _readers(
    trace: Trace, origin: Origin, ties: Mapping[str, tuple[str, ...]]
) -> tuple[tuple[str, ...], str]:
    """Who reads an origin, and why something else than these does, or ""."""
    readers, kept = [], ""
    tables = {o.name for o in trace.origins.all if o.kind == "embedding"}
    for product in trace.products:
        if product.given is None or len(product.given) != 1 or product.given[0].operators:
            continue
        if trace.origins.sole(product.given[0].labels) is origin:
            readers.append(product.weight)
            if product.weight in ties or product.weight in tables:
                kept = kept or f"{product.weight} has another use"
            if product.convolution:
                kept = kept or "a convolution that pads reads it"
    readers += [
        call.module
        for call in trace.experts
        if call.given is not None and trace.origins.sole(call.given[0].labels) is origin
    ]
    if origin.operators:
        kept = f"{', '.join(sorted(origin.operators))} uses it too"
    if origin in trace.made:
        kept = "the model gives it"
    if not readers and not kept:
        kept = "no linear layer reads it"
    return tuple(dict.fromkeys(readers)), kept


def _writer(trace: Trace, call: NormCall) -> str | None:
    """The weight that makes what a norm reads, where that is of no other use."""
    before = call.before
    if before is None or before.operators != {"a norm"} or before in trace.made:
        return None
    for product in trace.products:
        if any(trace.origins.sole(x.labels) is before for x in product.given or ()):
            return None
    return next((p.weight for p in trace.products if p.origin is before), None)


@torch.no_grad()
def kind_of(
    module: nn.Module, weight: str | None, bias: str | None, shape: torch.Size
) -> tuple[Any, int]:
    """What a module with one scale per channel computes, and what is added to its weight.

    >>> kind_of(nn.LayerNorm(4), "weight", "bias", torch.Size([1, 2, 4]))
    ('layer', 0)
    """
    if isinstance(module, nn.GroupNorm | BATCH_NORMS):
        return "group" if isinstance(module, nn.GroupNorm) else "batch", 0
    if weight is None or len(list(module.parameters())) > 1 + (bias is not None):
        return "unknown", 0
    meta = any(p.is_meta for p in module.parameters())
    tried = copy.deepcopy(module).to_empty(device="cpu") if meta else copy.deepcopy(module).cpu()
    tried = tried.double()
    for name, parameter in tried.named_parameters():
        normal_(parameter, seed=0, name=name, std=1.0)
    size = tried.get_parameter(weight).numel()
    x = normal_(torch.empty(1, 3, size, dtype=torch.float64), seed=0, name="x", std=1.0)
    try:
        given = tried(x)
    except (RuntimeError, TypeError, ValueError):
        return "unknown", 0
    scale = tried.get_parameter(weight)
    shift = tried.get_parameter(bias) if bias else torch.zeros(size, dtype=torch.float64)
    epsilon = next((e for n in _EPSILON if isinstance(e := getattr(module, n, None), float)), 1e-6)
    centred = x - x.mean(-1, keepdim=True)
    forms: dict[str, Tensor] = {
        "layer": centred / (centred.square().mean(-1, keepdim=True) + epsilon).sqrt(),
        "rms": x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt(),
        "scale": x,
    }
    for kind, normal in forms.items():
        for offset in (0, 1):
            if isinstance(given, Tensor) and torch.allclose(
                given.double(), normal * (scale + offset) + shift, rtol=1e-4, atol=1e-4
            ):
                return kind, offset
    return "unknown", 0
