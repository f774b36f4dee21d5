"""The frozen weight under an adapter, whatever form and place it is kept in: read, and written.

Weights are [out, in] here, fp32 or fp64 as `at_least_fp32` says, and unsharded, also where ranks
hold parts of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from modicum.adapters.adapter_layer import LayerChange
from modicum.adapters.sites import Site
from modicum.adapters.slices import holder, layer_name, places
from modicum.core.errors import InputError
from modicum.core.layers.formed_model import stands_for_transposed
from modicum.core.layers.linear_forms import DENSE, form_of, full_weight, own_rows, write_weight
from modicum.core.ranks.sharding import is_sharded, own_part, whole


def read(base: nn.Module, site: Site) -> Tensor:
    """The weight that a layer represents, [out, in], not to be written into; of a slice its rows.

    Of a layer that is sharded over ranks every rank calls this, and they gather it.
    """
    return _own_rows(read_layer(base, site), site)


def read_layer(base: nn.Module, site: Site) -> Tensor:
    """The weight [out, in] of the layer that a site is, or is a slice of."""
    layer = holder(base)
    known = form_of(layer) is not None
    stored = full_weight(layer) if known else layer.get_parameter("weight")
    return oriented(at_least_fp32(whole(stored.detach())), site).flatten(1)


def _own_rows(weight: Tensor, site: Site) -> Tensor:
    """Of a layer's weight [out, in] the rows of a site."""
    return weight if site.rows is None else weight[places(site.rows, weight.device)]


def given(reader: Callable[[str], Tensor], site: Site, base: nn.Module) -> Tensor:
    """The weight [out, in] that a reader of the model's files gives for a layer, on its device.

    Raises:
        InputError: it is of another shape than the layer's.
    """
    device = next(holder(base).parameters(recurse=False)).device
    weight = at_least_fp32(reader(layer_name(site)).to(device))
    if site.transposed or stands_for_transposed(holder(base)):
        weight = weight.T
    weight = _own_rows(weight, site)
    if weight.shape != (site.out_features, site.in_features):
        raise InputError(
            f"the weight to split has shape {tuple(weight.shape)}, the layer's is "
            f"{(site.out_features, site.in_features)}",
            field=site.name,
        )
    return weight


def write(base: nn.Module, site: Site, weight: Tensor) -> None:
    """Put a full weight [out, in] into a layer, rounded as its form does; a rank, its own rows.

    Raises:
        InputError: the layer's form cannot represent any weight.
    """
    if site.rows is not None:
        changed = read_layer(base, site).clone()
        changed[places(site.rows, weight.device)] = weight
        fused = replace(site, rows=None, out_features=len(changed))
        write(holder(base), fused, changed)
        return
    if form_of(base) is not None:
        count, before = own_rows(base)
        write_weight(base, weight[before : before + count])
        return
    rows = site.in_features if site.transposed else site.out_features
    like = next(p for p in base.parameters(recurse=False) if p.shape[:1] == (rows,))
    part, before = own_part(like.detach())
    part.copy_(oriented(weight, site)[before : before + part.shape[0]].view_as(part))


def shifted(base: nn.Module, change: LayerChange) -> Mapping[str, Tensor] | None:
    """The tensors of a layer that take an unsharded change without loss, with their new values.

    None where they cannot. A rank gets its own part.
    """
    form = form_of(base)  # a slice has none: a tile may be of several slices
    if form is None or form.shift is None or change.weight is None or change.bias is not None:
        return None
    count, before = own_rows(base)
    return form.shift(base, change.weight[before : before + count])


def read_bias(base: nn.Module) -> Tensor | None:
    """The bias [out] of a layer, not to be written into; None where it has none.

    Of a layer that is sharded over ranks every rank calls this, and they gather it.
    """
    bias = base._parameters.get("bias")
    return None if bias is None else at_least_fp32(whole(bias.detach()))


def write_bias(base: nn.Module, bias: Tensor) -> None:
    """Put a full bias [out] into a layer, which may have had none; a rank, its own part.

    Raises:
        InputError: the layer has none, and no place for one or no rank that could hold all of it.
    """
    there = base._parameters.get("bias")
    if there is not None:
        part, before = own_part(there.detach())
        part.copy_(bias[before : before + part.shape[0]])
        return
    weight = base.get_parameter("weight")
    if "bias" not in base._parameters or is_sharded(weight):
        raise InputError(
            "this layer has no bias, and the adapter would give it one; leave it out with "
            "`exclude`, or keep the adapter unmerged",
            value=type(base).__name__,
        )
    base.bias = nn.Parameter(bias.to(weight.device, weight.dtype), requires_grad=False)


def oriented(weight: Tensor, site: Site) -> Tensor:
    """A weight [out, in] as the base stores it, or one that is stored so as [out, in]."""
    return weight.T if site.transposed else weight


def check_finite(weight: Tensor, name: str) -> None:
    """Make sure that the weight of the layer `name` can be decomposed.

    Raises:
        InputError: it has values that are not finite.
    """
    if not weight.isfinite().all():
        raise InputError("its weight has values that are not finite", value=name)


def at_least_fp32(tensor: Tensor) -> Tensor:
    """The same values in fp32, or in fp64 where they are that already."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def is_plain(base: nn.Module) -> bool:
    """Whether a layer holds its weight as every model does, not as codes or factors."""
    return form_of(holder(base)) in (None, DENSE)


def is_exact(base: nn.Module) -> bool:
    """Whether a layer can hold any weight and gives it back, to its dtype.

    A quantized one does not give it back; one of low rank cannot hold it.

    >>> is_exact(nn.Linear(2, 2))
    True
    """
    form = form_of(holder(base))
    return form is None or (form.exact and form.write is not None)


def holds_its_weight(base: nn.Module) -> bool:
    """Whether a layer's weight is what the layer holds, and no rounding of one in a file.

    So are plain layers and factors, which no dense weight can be put into.

    >>> holds_its_weight(nn.Linear(2, 2))
    True
    """
    form = form_of(holder(base))
    return form is None or form.exact or form.write is None


def round_trip(base: nn.Module, weight: Tensor) -> Tensor:
    """What would be left of a full weight [out, in] in a layer of the same form: fp32."""
    form = form_of(base)
    if form is None or form.exact:
        return weight
    return form.round_trip(weight, **form.arguments(base)).to(weight.dtype)


def dense_layer(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> nn.Module:
    """A frozen `nn.Linear` of this weight and bias."""
    made = DENSE.from_dense(weight.to(dtype), None if bias is None else bias.to(dtype))
    return made.requires_grad_(False)
