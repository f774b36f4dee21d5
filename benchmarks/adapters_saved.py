"""Saved bytes of adapters next to what their equations need, by unique storage.

The need is counted apart from the adapters' code: what the frozen model keeps anyway, each layer
input that a factor's gradient reads, once, where that is not kept anyway, the thin products, and a
bit for each number that dropout may drop. Neither casts nor matrices made of factors are in it.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from adapters_contenders import (
    LINEARS,
    Sizes,
    flowing,
    llama,
    precision,
    saved_by,
    twin,
    value_of,
    with_ours,
    with_theirs,
)
from torch import Tensor, nn

from modicum.adapters import S2FT
from modicum.adapters.base import Adapter
from modicum.adapters.sites import Site
from modicum.core.torch_private import storage_address
from modicum.proofs.bench.meters import saved_bytes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DROPOUTS = (0.0, 0.05)


@dataclass(frozen=True)
class Need:
    """What the equations of an adapter ask of a position of a layer.

    Args:
        input_parts: the layer's input, or sums of so many of its channels each; 0: neither.
        numbers: that are kept in addition, in the dtype of the products.
        droppable: numbers that dropout may drop, where there is dropout.
    """

    input_parts: int
    numbers: int
    droppable: int


def need(name: str, value: Adapter, site: Site) -> Need:
    """That of one adapter, by its equations."""
    fields, dropout = value.model_dump(), value.dropout > 0
    rank, ins, outs = fields.get("rank") or 0, site.in_features, site.out_features
    match name:
        case "lora_fa":  # dB reads A x; what is dropped is A x
            return Need(0, rank, rank)
        case "lora_xs" | "lora_sb":  # dR reads A x
            return Need(0, rank, ins)
        case "svfit" | "loldu":  # dd reads D x [k], or is made of dW = dy x^T where k is large
            full = not rank or rank >= min(ins, outs)
            return Need(1, 0, ins) if full else Need(0, rank, ins)
        case "dora":  # the magnitude's gradient reads the layer's new output
            return Need(1, rank + outs, ins)
        case "hydra":  # the sequential A reads what the frozen layer gives
            inner = fields["rank"] + fields["sequential_rank"]
            return Need(1, inner + outs, inner)
        case "randlora" | "salt" | "snella" | "soka" | "shira":  # all is made anew of x
            return Need(1, 0, ins)
        case "s2ft":  # dV reads the columns' channels of x
            return Need(0, cast(S2FT, value).gathered(site), 0)
        case "flylora":  # k numbers and k places
            return Need(0, 2 * fields["active"], ins)
        case "compacter" | "mosa":  # behind a branch: what it gives, and the bottleneck
            narrow = fields.get("bottleneck") or outs // fields["reduction_factor"]
            return Need(0, outs + narrow, outs)
        case "qa_hira" | "q_bara":  # sums of channels, unless x was dropped
            parts, pooled = (
                fields.get("tile_columns") or fields["pooling"],
                fields.get("pooling", 0),
            )
            return Need(1 if dropout else parts, rank * pooled, ins)
        case "block_lora":  # arms share A x, unless each has a mask of its own
            masks = fields["blocks"] if fields["arms"] == "own_masks" else 1
            apart = dropout and masks > 1
            return Need(1, rank if apart else rank // fields["blocks"], ins * masks)
    return Need(1, rank, ins)


@dataclass(frozen=True)
class Floor:
    """What the frozen model keeps, and the inputs of its layers.

    Args:
        inputs: of each layer, the place and the bytes of its input's storage.
    """

    kept: Mapping[int, int]
    inputs: Mapping[str, tuple[int, int]]

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.kept.values())


def floor_of(base: Any, ids: Tensor, dtype: torch.dtype) -> Floor:
    """Run the frozen model forward."""
    model, inputs, alive = flowing(twin(base)), {}, []

    def note(name: str) -> Any:
        def see(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
            alive.append(given[0])  # or another storage would come to its place
            size = given[0].untyped_storage().nbytes()
            inputs[name] = storage_address(given[0]), size

        return see

    for name, layer in model.named_modules():
        if name.rsplit(".", 1)[-1] in LINEARS:
            layer.register_forward_pre_hook(note(name))
    apart = [*model.parameters(), *model.buffers()]
    with precision(dtype), saved_bytes(apart) as saved:
        outputs = model(input_ids=ids, labels=ids)
    alive.clear()
    del outputs
    return Floor(saved.storages, inputs)


def needed(name: str, attached: Any, floor: Floor, positions: int, dtype: torch.dtype) -> int:
    """Bytes that an adapter's equations need in addition to the floor."""
    value: Adapter = attached.method
    read: dict[int, int] = {}
    own = 0
    for place, site in attached.sites.items():
        asks = need(name, value, site)
        if asks.input_parts:
            address, size = floor.inputs[place]
            if address not in floor.kept:
                read[address] = max(read.get(address, 0), size // asks.input_parts)
        own += asks.numbers * positions * dtype.itemsize
        own += -(-asks.droppable * positions // 8) if value.dropout else 0
    return own + sum(read.values())


def measure(names: list[str], sizes: Sizes, seed: int, layers: int) -> dict[str, Any]:
    """By method, precision and dropout: bytes kept, needed, of peft, and the floor's."""
    ids = torch.randint(sizes.vocabulary, (sizes.rows, sizes.tokens))
    found: dict[str, Any] = {name: {} for name in names}
    for kind, dtype in DTYPES.items():
        base = llama(sizes, seed, layers).to(dtype)
        floor = floor_of(base, ids, dtype)
        for dropout in DROPOUTS:
            for name in names:
                if dropout and "writes_base" in value_of(name).traits:
                    continue  # its change has no input of its own
                model, attached = with_ours(base, name, ids, seed=seed, dropout=dropout)
                ours = saved_by(model, ids, dtype)
                asks = needed(name, attached, floor, ids.numel(), dtype)
                trained = sum(p.numel() for p in attached.parameters())
                pair = with_theirs(base, name, dropout=dropout, trained=trained)
                theirs = None if pair is None else saved_by(pair[0], ids, dtype)
                row = {
                    "ours": ours,
                    "floor": floor.total,
                    "needed": floor.total + asks,
                    "over_needed": ours / (floor.total + asks),
                    "own_over_needed": (ours - floor.total) / asks,
                }
                if theirs is not None:
                    row |= {"peft": theirs, "over_peft": ours / theirs}
                found[name][f"{kind}, dropout {dropout:g}"] = row
                del model, attached, pair
                gc.collect()  # models and their handles point at each other
    return found
