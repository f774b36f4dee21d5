"""The threshold above which a given number of entries lies, also where a tensor says how many."""

from __future__ import annotations

import torch
from torch import Tensor


# An operator of its own, so that compiled graphs hold it as one and are not compiled anew where the
# number is another.
@torch.library.custom_op("modicum::below_largest", mutates_args=())
def below_largest(sizes: Tensor, kept: Tensor) -> Tensor:
    """The size [1] such that `kept` entries are larger: the largest one of all the others.

    Where entries equal it, fewer are larger.

    Args:
        sizes: of any shape, none negative.
        kept: how many, an integer [1], at most all; then it is -1.

    >>> below_largest(torch.tensor([3.0, 1.0, 0.0, 2.0]), torch.tensor([2]))
    tensor([1.])
    """
    flat = sizes.flatten()
    others = flat.numel() - int(kept)
    if not others:
        return flat.new_full((1,), -1.0)
    return flat.kthvalue(others).values.reshape(1).clone()


@below_largest.register_fake
def _(sizes: Tensor, kept: Tensor) -> Tensor:
    return sizes.new_empty(1)
