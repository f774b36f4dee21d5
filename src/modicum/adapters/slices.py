"""Slices of a fused layer as places for adapters: the rows of q, of k, of v in one weight.

A layer that holds several projections gets a child for each slice with an adapter: a `Slice`, on
which the adapter is as on any layer. It has no tensors of its own. A hook on the fused layer adds
what the slices' adapters give to these outputs, in place, so that no other output is read or
copied. The layer itself, its class, its weight and its names stay as they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.layers.layer_sites import Site
from modicum.core.layers.map_parts import MappedSlice
from modicum.core.ranks.sharding import is_sharded
from modicum.core.torch_private import hooks_with_keywords, transforms_run


class Slice(nn.Module):
    """Some of a fused layer's outputs: [..., in] to [..., rows], zeros without an adapter.

    >>> rows = MappedSlice("weight", 0, 2, (2, 1), (1, 0))
    >>> fused = nn.Linear(3, 6)
    >>> Slice(fused, Site("qkv.k_proj", "linear", 3, 2, rows=rows))(torch.ones(4, 3)).shape
    torch.Size([4, 2])
    """

    def __init__(self, fused: nn.Module, site: Site) -> None:
        super().__init__()
        assert site.rows is not None
        self.put_on(fused)
        self.rows = site.rows
        self.in_features, self.out_features = site.in_features, site.out_features

    def put_on(self, fused: nn.Module) -> None:
        """Say which layer holds the weight."""
        self._fused = (fused,)  # in a tuple it is no submodule of its own child

    @property
    def fused(self) -> nn.Module:
        """The layer that holds the weight."""
        return self._fused[0]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        kind, dtype = input.device.type, torch.promote_types(input.dtype, torch.float32)
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        # More precise than the layer's output may be, to which it is added and rounded once.
        return input.new_zeros((), dtype=dtype).expand(*input.shape[:-1], self.out_features)


def holder(base: nn.Module) -> nn.Module:
    """The layer that holds a site's weight: a slice's fused layer, any other itself."""
    return base.fused if isinstance(base, Slice) else base


def layer_name(site: Site) -> str:
    """The name of the layer that holds a site's weight."""
    return site.name.rpartition(".")[0] if site.rows is not None else site.name


def places(rows: MappedSlice, device: torch.device | None = None) -> Tensor:
    """The rows of a slice in their order, int64 [rows]."""
    found = torch.full((1,), rows.start, device=device)
    for size, stride in zip(rows.shape, rows.strides, strict=True):
        found = (found[:, None] + torch.arange(size, device=device) * stride).flatten()
    return found


def has_slices(layer: nn.Module) -> bool:
    """Whether slices of a layer have adapters."""
    return any(isinstance(child, Slice) for child in layer.children())


def open_slices(model: nn.Module, sites: Iterable[Site]) -> None:
    """Give fused layers children for those sites that are slices of them."""
    for site in sites:
        if site.rows is None:
            continue
        fused, own = model.get_submodule(layer_name(site)), site.suffix
        if own not in fused._modules:
            fused.add_module(own, Slice(fused, site).train(fused.training))
        if _add_slices not in fused._forward_hooks.values():
            fused.register_forward_hook(_add_slices, with_kwargs=True)


def move_slices(old: nn.Module, new: nn.Module) -> None:
    """Make the slices of a layer those of another, which replaces it."""
    for name, child in list(old.named_children()):
        if isinstance(child, Slice):
            delattr(old, name)
            new.add_module(name, child)
            child.put_on(new)
    _drop_hook(old)
    new.register_forward_hook(_add_slices, with_kwargs=True)


def close_slices(model: nn.Module) -> None:
    """Take off the children of fused layers that have no adapter any more."""
    for layer in list(model.modules()):
        for name, child in list(layer.named_children()):
            if isinstance(child, Slice) and "layers_by_adapter" not in child._modules:
                delattr(layer, name)
                if not has_slices(layer):
                    _drop_hook(layer)


def check_apart(model: nn.Module, sites: Iterable[Site]) -> None:
    """Make sure that no layer has an adapter and, on a slice of it, another one.

    Raises:
        InputError: one would have.
    """
    for site in sites:
        layer = model.get_submodule(layer_name(site))
        if site.rows is None and has_slices(layer):
            raise InputError(
                "slices of this layer have an adapter, which would be in the way of one on all of "
                "it; merge or detach that one first",
                value=site.name,
            )
        on_layer = getattr(layer, "layers_by_adapter", None)
        others = [] if site.rows is None or on_layer is None else list(on_layer.children())
        if any(other.site.kind != "module" for other in others):
            raise InputError(
                f"{layer_name(site)} has an adapter on all of it, which would be in the way of one "
                "on a slice; merge or detach that one first",
                value=site.name,
            )


def _drop_hook(layer: nn.Module) -> None:
    # By what it is, as the handle of a copied model would be another's.
    for key in [key for key, known in layer._forward_hooks.items() if known is _add_slices]:
        del layer._forward_hooks[key]
        hooks_with_keywords(layer).pop(key, None)


def _active(layer: nn.Module) -> Iterator[Slice]:
    for child in layer.children():
        if isinstance(child, Slice) and bool(getattr(child, "active", False)):
            yield child


def _add_slices(layer: nn.Module, given: Any, named: dict[str, Any], outputs: Any) -> Any:
    """What a fused layer gives, and what the adapters on its slices add to it.

    Raises:
        InputError: the outputs are sharded over ranks, so the slices are not where they were.
    """
    slices = list(_active(layer))
    if not slices:
        return outputs
    inputs = given[0] if given else next(iter(named.values()))
    _check_width(slices, outputs)
    updates = [child(inputs) for child in slices]
    rows = [child.rows for child in slices]
    plain = not torch.compiler.is_compiling() and transforms_run()
    # Who has replaced the layer's `forward` may have another use of what it gives.
    if plain or torch.compiler.is_compiling() or "forward" in layer.__dict__:
        for each, update in zip(rows, updates, strict=True):
            index = places(each, outputs.device)
            outputs = outputs.index_add(-1, index, update.to(outputs.dtype))
        return outputs
    return _RowsAdded.apply(outputs, rows, *updates)


def _check_width(slices: Iterable[Slice], outputs: Tensor) -> None:
    for child in slices:
        last = child.rows.start
        last += sum((n - 1) * s for n, s in zip(child.rows.shape, child.rows.strides, strict=True))
        if last >= outputs.shape[-1] or is_sharded(outputs):
            raise InputError(
                "a slice of this layer has an adapter, and its outputs are sharded over ranks; use "
                "ddp or fsdp, or put the adapter on all of the layer",
                value=type(child.fused).__name__,
            )


class _RowsAdded(torch.autograd.Function):
    """outputs [..., out] with updates [..., rows] added to some of its last dimension, in place.

    Its graph adds nothing to what is kept, and in the backward pass no copy of all outputs: their
    gradient is that of the sum, and that of an update is a part of it.
    """

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, rows: list[MappedSlice], *updates: Tensor) -> Tensor:
        ctx.rows, ctx.dtypes = rows, [update.dtype for update in updates]
        summed = outputs.detach()  # the same memory, and the same count of changes
        for each, update in zip(rows, updates, strict=True):
            view = _grid(summed, each)
            view.add_(update.view(view.shape))
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        parts = (
            _grid(gradient, each).flatten(gradient.ndim - 1).to(dtype)
            for each, dtype in zip(ctx.rows, ctx.dtypes, strict=True)
        )
        return gradient, None, *parts


def _grid(tensor: Tensor, rows: MappedSlice) -> Tensor:
    """The places of a slice in the last dimension of a tensor, as a view: [..., *rows.shape]."""
    *others, step = tensor.stride()
    strides = [*others, *(stride * step for stride in rows.strides)]
    start = tensor.storage_offset() + rows.start * step
    return tensor.as_strided([*tensor.shape[:-1], *rows.shape], strides, start)
