"""The frozen weight under an adapter, whatever form and place it is kept in: read, and written.

Weights are [out, in] here, fp32 or fp64 as `at_least_fp32` says, and unsharded, also where ranks
hold parts of them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from modicum.adapters.sites import Site
from modicum.core.errors import InputError
from modicum.core.layers.linear_forms import DENSE, form_of, full_weight, write_weight
from modicum.core.ranks.sharding import is_sharded, own_part, whole


def read(base: nn.Module, site: Site) -> Tensor:
    """The weight that a layer represents, [out, in], not to be written into.

    Of a layer that is sharded over ranks every rank calls this, and they gather it.
    """
    known = form_of(base) is not None
    stored = full_weight(base) if known else base.get_parameter("weight")
    return oriented(at_least_fp32(whole(stored.detach())), site)


def write(base: nn.Module, site: Site, weight: Tensor) -> None:
    """Put a full weight [out, in] into a layer, rounded as its form does; a rank, its own rows.

    Raises:
        InputError: the layer's form cannot represent any weight.
    """
    rows = site.in_features if site.transposed else site.out_features
    like = next(p for p in base.parameters(recurse=False) if p.shape[:1] == (rows,))
    part, before = own_part(like.detach())
    own = oriented(weight, site)[before : before + part.shape[0]]
    if form_of(base) is None:
        part.copy_(own)
    else:
        write_weight(base, own)


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


def at_least_fp32(tensor: Tensor) -> Tensor:
    """The same values in fp32, or in fp64 where they are that already."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def is_plain(base: nn.Module) -> bool:
    """Whether a layer holds its weight as every model does, not as codes or factors."""
    return form_of(base) in (None, DENSE)


def is_exact(base: nn.Module) -> bool:
    """Whether a layer can hold any weight and gives it back, to its dtype.

    A quantized one does not give it back; one of low rank cannot hold it.

    >>> is_exact(nn.Linear(2, 2))
    True
    """
    form = form_of(base)
    return form is None or (form.exact and form.write is not None)


def round_trip(base: nn.Module, weight: Tensor) -> Tensor:
    """What would be left of a full weight [out, in] in a layer of the same form: fp32."""
    form = form_of(base)
    return weight if form is None or form.exact else form.round_trip(weight).to(weight.dtype)
