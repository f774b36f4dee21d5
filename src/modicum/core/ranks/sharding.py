"""Tensors of which a rank may hold a part: the same words for unsharded ones and for DTensors."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from modicum.core.torch_private import local_box

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether `tensor` is a DTensor."""
    # Where nobody has imported DTensor, which takes a while, no tensor is one.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def own_part(tensor: Tensor) -> tuple[Tensor, int]:
    """This rank's part of a tensor, and how many rows (of dimension 0) of the full one precede it.

    >>> import torch
    >>> whole = torch.ones(3, 2)
    >>> part, before = own_part(whole)
    >>> part is whole, before
    (True, 0)

    Raises:
        ValueError: the tensor is sharded over another dimension than 0.
    """
    if not is_sharded(tensor):
        return tensor, 0
    offsets, shape = local_box(tensor.shape, tensor.device_mesh, tensor.placements)
    if any(offsets[1:]) or shape[1:] != tuple(tensor.shape[1:]):
        raise ValueError(f"sharded over another dimension than 0: {tensor.placements}")
    return tensor.to_local(), offsets[0] if shape[0] else tensor.shape[0]


def shard_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """The ranks that hold the rows of this parameter between them; None where each holds all.

    Raises:
        ValueError: it is sharded over several dimensions of a mesh.
    """
    if not is_sharded(parameter):
        return None
    dim = shard_dim(parameter)
    return None if dim is None else parameter.device_mesh.get_group(dim)


def shard_dim(tensor: DTensor) -> int | None:
    """The dimension of a mesh over which a tensor is sharded; None where each rank holds all.

    A dimension of one rank shards nothing.

    Raises:
        ValueError: there are several, so that no one group of ranks holds the rows between them.
    """
    placed = enumerate(tensor.placements)
    dims = [dim for dim, at in placed if at.is_shard() and tensor.device_mesh.size(dim) > 1]
    if len(dims) > 1:
        raise ValueError(f"sharded over several dimensions of a mesh: {tensor.placements}")
    return dims[0] if dims else None


def elements_before(tensor: Tensor) -> int:
    """How many elements of the full tensor lie before this rank's part of it."""
    _, rows = own_part(tensor)
    return rows * math.prod(tensor.shape[1:])


def whole(tensor: Tensor) -> Tensor:
    """The full tensor; of a sharded one every rank calls this, and they gather it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def cut_alike(part: Tensor, like: Tensor, columns: int) -> Tensor:
    """The matrix of which `part` is this rank's rows, sharded over ranks as `like` is: a DTensor.

    Where `like` is unsharded, so is `part`.

    >>> import torch
    >>> cut_alike(torch.ones(2, 5), torch.ones(2, 3), 5).shape
    torch.Size([2, 5])
    """
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        shape=torch.Size((like.shape[0], columns)),
        stride=(columns, 1),
    )


def laid_out_like(full: Tensor, like: DTensor) -> DTensor:
    """A tensor that every rank has in full, of which each keeps the rows of an even sharding.

    It is sharded over the ranks that `like` is sharded over, which may have another number of rows.
    """
    from torch.distributed.tensor import DTensor

    offsets, sizes = local_box(full.shape, like.device_mesh, like.placements)
    return DTensor.from_local(
        full[offsets[0] : offsets[0] + sizes[0]],
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


def laid_like(part: Tensor, like: DTensor) -> DTensor:
    """The tensor of `like`'s shape of which `part` is what this rank holds, sharded as `like` is.

    Every rank gives its own part; nothing is sent.
    """
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
