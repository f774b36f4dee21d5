"""LoRAs of slices as PEFT can have them: one LoRA of the fused layer, whose B is zero elsewhere.

PEFT knows no slices. The LoRAs of q and of v are exactly one LoRA of the layer that holds both: A
is theirs one after the other, and B has the rows of each next to zeros, so its rank is their sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from modicum.adapters.attachment import Attachment
from modicum.adapters.sites import Site
from modicum.adapters.slices import Slice, holder, layer_name, places

LoRATensors = tuple[Tensor, Tensor, float]


def sites_of(attached: Attachment) -> dict[str, Site]:
    """The layers that an adapter is on, by name: of slices the fused ones."""
    found: dict[str, Site] = {}
    for site in attached.sites.values():
        name = layer_name(site)
        if site.rows is not None:
            outputs = _outputs(attached, site)
            site = replace(site, name=name, out_features=outputs, rows=None)
        found[name] = site
    return found


def on_layers(attached: Attachment, loras: Mapping[str, LoRATensors]) -> dict[str, LoRATensors]:
    """By layer (A [r, in], B [out, r], s), of such LoRAs by site."""
    by_layer: dict[str, list[tuple[Site, LoRATensors]]] = {}
    for name, lora in loras.items():
        site = attached.sites[name]
        by_layer.setdefault(layer_name(site), []).append((site, lora))
    return {name: _joined(attached, each) for name, each in by_layer.items()}


def has_slices(attached: Attachment) -> bool:
    """Whether an adapter is on slices of fused layers."""
    return any(site.rows is not None for site in attached.sites.values())


def _joined(attached: Attachment, each: list[tuple[Site, LoRATensors]]) -> LoRATensors:
    first, lora = each[0]
    if first.rows is None:
        return lora
    scales = {scale for _, (_, _, scale) in each}
    scale = scales.pop() if len(scales) == 1 else 1.0
    downs, ups = [], []
    for site, (a, b, own) in each:
        assert site.rows is not None
        up = b.new_zeros(_outputs(attached, site), b.shape[1])
        up[places(site.rows, b.device)] = b if own == scale else own * b
        downs.append(a)
        ups.append(up)
    return torch.cat(downs), torch.cat(ups, 1), scale


def _outputs(attached: Attachment, site: Site) -> int:
    """How many outputs the fused layer of a slice has."""
    there = attached.model.get_submodule(site.name)
    assert isinstance(there, Slice)
    layer = holder(there)
    outputs = getattr(layer, "nf" if site.transposed else "out_features")
    assert isinstance(outputs, int)
    return outputs
