"""Exchange, remove and silence units of a model by its map, in place.

Knows slices, tensors and the numbers that a forward pass reads of its modules. Optimizers that hold
the old parameters are not changed: edit first, then make them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from modicum.core.contracts.parameters import describe_parameter, metadata
from modicum.core.errors import InputError
from modicum.core.layers.map_parts import MappedSlice, Units
from modicum.core.ranks.sharding import is_sharded

# What modules, and the configurations that they read in `forward`, call these numbers.
_HEADS = ("num_heads", "num_attention_heads", "n_head", "n_heads", "heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_heads", "n_kv_heads")
_PER_GROUP = ("num_key_value_groups",)
_ALL_WIDTHS = ("all_head_size", "split_size")
_NEURONS = ("intermediate_dim", "intermediate_size", "expert_dim", "ffn_dim")


@torch.no_grad()
def permute(model: nn.Module, units: Units, order: Sequence[int]) -> None:
    """Exchange units: unit `order[u]` comes to place u, in all slices. The model computes the same.

    Raises:
        InputError: this is no order of the units, or their order matters.

    >>> from modicum.core.layers.map import find_map
    >>> model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
    >>> x = torch.ones(1, 3)
    >>> before = model(x)
    >>> permute(model, find_map(model, x).mlps[0].neurons, [1, 0])
    >>> bool((model(x) - before).abs().max() < 1e-6)
    True
    """
    check_order(model, units, order)
    exchange(model, units, torch.tensor(order))


def check_order(model: nn.Module, units: Units, order: Sequence[int]) -> None:
    """Check that `permute` can be asked for this; nothing is changed.

    Raises:
        InputError: as `permute`.
    """
    runs = [place // units.within for place in range(units.count)]
    if sorted(order) != list(range(units.count)):
        raise InputError(f"must be an order of {units.count} units", field="order", value=order)
    if [runs[place] for place in order] != runs:
        raise InputError(
            f"can be exchanged within runs of {units.within}, which share keys and values; move "
            "those with `groups`",
            field="order",
            value=order,
        )
    if units.order_matters:
        raise InputError(f"their order matters: {units.order_matters}", value=units.name)
    _check_unsharded(model, units)


@torch.no_grad()
def exchange(model: nn.Module, units: Units, order: Tensor) -> None:
    """`permute` without questions."""
    for piece in dict.fromkeys(units.slices):
        tensor = tensor_of(model, piece.tensor)
        places = piece.places().reshape(units.count, -1)
        taken = tensor.index_select(piece.dim, places[order].flatten().to(tensor.device))
        tensor.index_copy_(piece.dim, places.flatten().to(tensor.device), taken)


@torch.no_grad()
def silence(model: nn.Module, units: Units, which: Iterable[int]) -> None:
    """Zero what reads some units, so that they do nothing. Shapes stay as they are.

    Raises:
        InputError: there are no such units.
    """
    chosen = _chosen(units, which)
    for piece in dict.fromkeys(units.readers):
        tensor = tensor_of(model, piece.tensor)
        places = piece.places().reshape(units.count, -1)[chosen].flatten()
        tensor.index_fill_(piece.dim, places.to(tensor.device), 0.0)


@torch.no_grad()
def remove(model: nn.Module, units: Units, which: Iterable[int]) -> None:
    """Take units out of all tensors; the model then computes what it does with them silenced.

    Parameters are replaced by smaller ones, and the numbers that the modules read are corrected; a
    module that reads them of a configuration gets a copy of it. A module with a method
    `units_removed` is called by it, to correct what it says of itself as well. A map found before
    no longer holds for the layers that were changed: find it anew.

    Raises:
        InputError: there are no such units, these are needed, all would go, or groups of query
            heads would keep different numbers of them.
    """
    chosen = check_removal(model, units, which)
    gone: dict[tuple[str, int], list[Tensor]] = {}
    for piece in dict.fromkeys(units.slices):
        places = piece.places().reshape(units.count, -1)[chosen].flatten()
        gone.setdefault((piece.tensor, piece.dim), []).append(places)
    for (name, dim), places_gone in gone.items():
        _shrink(model, name, dim, torch.cat(places_gone))
    recount(model, units, len(chosen))


def check_removal(model: nn.Module, units: Units, which: Iterable[int]) -> Tensor:
    """The units [k], in order, after a check that `remove` can be asked for them.

    Raises:
        InputError: as `remove`.
    """
    chosen = _chosen(units, which)
    if units.needed:
        raise InputError(f"cannot be removed: {units.needed}", value=units.name)
    left = [units.within] * (units.count // units.within)
    for place in chosen.tolist():
        left[place // units.within] -= 1
    if len({*left}) > 1 or not left[0]:
        raise InputError(
            "the same number of them, and not all, must go from each run of "
            f"{units.within} {units.kind}",
            field="which",
            value=chosen.tolist(),
        )
    _check_unsharded(model, units)
    return chosen


def _check_unsharded(model: nn.Module, units: Units) -> None:
    for piece in units.slices:
        if is_sharded(tensor_of(model, piece.tensor)):
            problem = "its weights are sharded over ranks already; change the model before that"
            raise InputError(problem, value=piece.tensor)


def tensor_of(model: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of that name."""
    path, _, leaf = name.rpartition(".")
    found = getattr(model.get_submodule(path), leaf)
    assert isinstance(found, Tensor)
    return found


def within_module(units: Units, name: str) -> Units:
    """The same units, with names as the module `name` has them."""

    def inner(pieces: tuple[MappedSlice, ...]) -> tuple[MappedSlice, ...]:
        prefix = f"{name}." if name else ""
        return tuple(replace(p, tensor=p.tensor.removeprefix(prefix)) for p in pieces)

    return replace(units, name="", makers=inner(units.makers), readers=inner(units.readers))


def _chosen(units: Units, which: Iterable[int]) -> Tensor:
    chosen = sorted(set(which))
    if not chosen or chosen[0] < 0 or chosen[-1] >= units.count:
        raise InputError(
            f"must name some of {units.count} {units.kind}", field="which", value=chosen
        )
    return torch.tensor(chosen)


def _shrink(model: nn.Module, name: str, dim: int, gone: Tensor) -> None:
    old = tensor_of(model, name)
    keep = torch.ones(old.shape[dim], dtype=torch.bool)
    keep[gone] = False
    rows = keep.nonzero().flatten().to(old.device)
    put_in(model, old, old.detach().index_select(dim, rows))


def put_in(model: nn.Module, old: Tensor, new: Tensor) -> None:
    """Put a tensor of another size wherever the model has this one; layers' own sizes follow."""
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
        describe_parameter(new, metadata(old))
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for leaf, tensor in list(held.items()):
                if tensor is old:
                    setattr(module, leaf, new)
                    _resize(module)


def _resize(module: nn.Module) -> None:
    """Correct what a layer says of its own size."""
    weight = module._parameters.get("weight")
    if weight is None:
        return
    sizes: dict[str, object] = {}
    if isinstance(module, nn.Linear):
        sizes = {"out_features": weight.shape[0], "in_features": weight.shape[1]}
    elif type(module).__name__ == "Conv1D" and weight.ndim == 2:
        sizes = {"nx": weight.shape[0], "nf": weight.shape[1]}
    elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        depthwise = module.groups > 1
        sizes = {"out_channels": weight.shape[0]}
        sizes["in_channels"] = weight.shape[0] if depthwise else weight.shape[1]
        sizes |= {"groups": weight.shape[0]} if depthwise else {}
    elif isinstance(module, nn.GroupNorm):
        each = module.num_channels // module.num_groups
        sizes = {"num_channels": len(weight), "num_groups": max(1, len(weight) // each)}
    elif isinstance(module, nn.LayerNorm):
        sizes = {"normalized_shape": tuple(weight.shape)}
    elif hasattr(module, "num_features"):
        sizes = {"num_features": len(weight)}
    for name, value in sizes.items():
        setattr(module, name, value)


def recount(model: nn.Module, units: Units, removed: int, *, back: bool = False) -> None:
    """Correct the numbers of heads or neurons that the modules around the slices read.

    Args:
        units: as they were before some were removed.
        back: whether the removed ones are there again.
    """
    changes = dict(_changes(units, removed))
    if back:
        changes = {name: (new, old) for name, (old, new) in changes.items()}
    for module in model.get_submodule(units.name).modules():
        for holder in (module, getattr(module, "config", None)):
            if holder is None:
                continue
            fit = {n: v for n, (old, v) in changes.items() if getattr(holder, n, None) == old}
            if holder is not module and fit and units.kind in ("heads", "groups"):
                # A configuration is shared by all layers, and this one alone has become another.
                holder = module.config = copy.copy(holder)
            elif holder is not module:
                continue
            for name, value in fit.items():
                setattr(holder, name, value)
    for module in model.modules():
        if callable(correct := getattr(module, "units_removed", None)):
            correct()


def _changes(units: Units, removed: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Names of numbers, with the value that they had and the one that they get."""
    if units.kind == "neurons":
        yield from ((name, (units.count, units.count - removed)) for name in _NEURONS)
    if units.kind not in ("heads", "groups"):
        return
    kv_heads, each, width = units.readers[0].shape
    new_kv, new_each = kv_heads, each
    if units.kind == "groups" or each == 1:
        new_kv -= removed
    else:
        new_each -= removed // kv_heads
    widths = (kv_heads * each * width, new_kv * new_each * width)
    for names, change in (
        (_HEADS, (kv_heads * each, new_kv * new_each)),
        (_KV_HEADS, (kv_heads, new_kv)),
        (_PER_GROUP, (each, new_each)),
        (_ALL_WIDTHS, widths),
    ):
        yield from ((name, change) for name in names)
