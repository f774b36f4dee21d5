"""A module that computes, for a while, with other tensors than its own parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def computing_with(module: nn.Module, tensors: Mapping[str, Tensor | None]) -> Iterator[None]:
    """Have a module compute with these tensors for its own parameters; compiled code may too.

    >>> import torch
    >>> layer = nn.Linear(2, 2)
    >>> with computing_with(layer, {"weight": torch.zeros(2, 2), "bias": None}):
    ...     layer(torch.ones(1, 2)).tolist()
    [[0.0, 0.0]]
    """
    own = {name: module._parameters[name] for name in tensors}
    for name, tensor in tensors.items():
        module._parameters[name] = tensor  # type: ignore[assignment]
    try:
        yield
    finally:
        for name, there in own.items():
            module._parameters[name] = there
