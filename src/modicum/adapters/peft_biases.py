"""PEFT's `lora_bias`: a LoRA whose B has a bias [out], which is Hydra here, both ways.

A Hydra without a sequential branch is just that. One with it is also, on a given weight and bias:
what its branches make of W is a LoRA, and what they make of the biases is the bias of B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from modicum.adapters.attachment import Attachment
from modicum.adapters.hydra import Hydra
from modicum.adapters.lora import LoRA
from modicum.adapters.names import plain_name
from modicum.adapters.native_files import StoredAdapter
from modicum.adapters.peft_copies import PREFIX, as_kept
from modicum.core.errors import InputError

SWITCH = "lora_bias"
_END = ".lora_B.bias"


def written(attached: Attachment) -> dict[str, Tensor]:
    """The biases of an adapter's layers by their names in a file; nothing where no layer has one.

    PEFT has one for every layer, or for none.
    """
    found = {name: layer.peft_bias() for name, layer in attached.layers()}
    if all(bias is None for bias in found.values()):
        return {}
    sites, made = attached.sites, dict[str, Tensor]()
    for name, bias in found.items():
        kept = torch.zeros(sites[name].out_features) if bias is None else as_kept(bias)
        made[f"{PREFIX}{plain_name(name)}{_END}"] = kept
    return made


def split(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a file without biases of B, and these by the plain names of their layers."""
    if not config.get(SWITCH):
        return dict(tensors), {}
    others = {key: tensor for key, tensor in tensors.items() if not key.endswith(_END)}
    names = tensors.keys() - others.keys()
    return others, {n.removeprefix(PREFIX).removesuffix(_END): tensors[n] for n in names}


def with_biases(stored: StoredAdapter, biases: Mapping[str, Tensor]) -> StoredAdapter:
    """A stored LoRA with these biases of B, as the method that it is here.

    A scale of a layer's own is taken into its B, as Hydra has one for all.

    Raises:
        InputError: its layers have ranks of their own, or there is a bias of no layer.
    """
    value = stored.method
    assert isinstance(value, LoRA)
    own = {name: value.with_fields(**fields) for name, fields in stored.prepared.items() if fields}
    if any(each.rank != value.rank for each in own.values()):
        problem = f"with {SWITCH}, all layers must have one rank"
        raise InputError(problem, file=stored.file, field="rank_pattern")
    scales = {name: each.scale / value.scale for name, each in own.items()}
    if strange := sorted(biases.keys() - set(value.targets)):
        problem = "the adapter is for another model: it has no such layer, or no factors of it"
        raise InputError(problem, file=stored.file, value=strange[0])
    hydra = Hydra(
        rank=value.rank,
        sequential_rank=0,
        scale=value.scale,
        biases=True,
        dropout=value.dropout,
        targets=value.targets,
        also=value.also,
    )
    state: dict[str, Tensor] = {}
    for key, tensor in stored.state.items():
        name, _, factor = key.rpartition(".")
        scaled = tensor * scales[name] if factor == "B" and name in scales else tensor
        state[f"{name}.{factor}_p" if factor in ("A", "B") else key] = scaled
    for name in value.targets:
        state[f"{name}.c_p"] = torch.zeros(value.rank)
    for name, bias in biases.items():
        state[f"{name}.d_p"] = scales[name] * bias if name in scales else bias
    return replace(stored, method=hydra, state=state, prepared={})
