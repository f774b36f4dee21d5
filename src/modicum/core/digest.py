"""Digests of tensors: a short name for numbers, under which what was made of them is kept."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from modicum.core.ranks.sharding import own_part


def tensors_digest(named: Iterable[tuple[str, Tensor]], *words: str) -> str:
    """A SHA-256, in hexadecimal, of names, dtypes, shapes and bytes, in this order, and of words.

    Of tensors that are sharded over ranks it is the digest of this rank's parts.

    >>> one, other = torch.zeros(2), torch.zeros(2, dtype=torch.int32)
    >>> tensors_digest([("x", one)]) == tensors_digest([("x", one.clone())])
    True
    >>> tensors_digest([("x", one)]) == tensors_digest([("x", other)])
    False
    """
    digest = hashlib.sha256("\0".join(words).encode())
    for name, tensor in named:
        part = own_part(tensor.detach())[0].cpu().contiguous()
        digest.update(f"\0{name} {part.dtype} {tuple(part.shape)} ".encode())
        digest.update(part.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
