"""Products of rows by the matrices of their groups, on tensors without memory.

On the meta device PyTorch knows that of bf16 alone, of which only CPUs have another kernel.
"""

from __future__ import annotations

from torch import Tensor

GROUPED = "_grouped_mm"


def empty_product(left: Tensor, right: Tensor, groups: Tensor) -> Tensor:
    """An empty tensor like the product; `groups` says where the rows of each group end.

    >>> import torch
    >>> rows, matrices = torch.empty(6, 8, device="meta"), torch.empty(4, 8, 5, device="meta")
    >>> empty_product(rows, matrices, torch.empty(4, device="meta")).shape
    torch.Size([6, 5])
    """
    sizes: tuple[int, ...] = (left.shape[-2], right.shape[-1])
    if left.dim() == right.dim():
        sizes = (groups.shape[0] if left.dim() == 2 else left.shape[0], *sizes)
    return left.new_empty(sizes)
