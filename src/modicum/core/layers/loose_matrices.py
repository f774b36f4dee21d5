"""Matrices that modules hold themselves, outside of linear layers: routers, stacked experts."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.nn.parameter import UninitializedParameter

EXPERTS = "stacked matrices of experts, which no form here can hold"
MATRIX = "a matrix that is no linear layer"
STACKED = "stacked matrices that are no linear layer"
# What they hold are kernels and tables.
_NO_MATRICES = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Embedding,
    nn.EmbeddingBag,
)


def loose_matrices(model: nn.Module, skip: Callable[[str, nn.Module], bool]) -> dict[str, str]:
    """Parameters that are matrices of no layer, one or stacked, by name, with what they are.

    Args:
        skip: says of a module, by its name and itself, that what it holds counts as a layer's.

    >>> loose_matrices(nn.LSTM(2, 2), lambda path, module: False)["weight_ih_l0"]
    'a matrix that is no linear layer'
    """
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, _NO_MATRICES) or skip(path, module):
            continue
        stacked = EXPERTS if _of_experts(path, module) else STACKED
        for leaf, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, UninitializedParameter):
                continue
            if parameter.ndim in (2, 3) and min(parameter.shape) > 1:
                name = f"{path}.{leaf}" if path else leaf
                found[name] = MATRIX if parameter.ndim == 2 else stacked
    return found


def stacked_experts(model: nn.Module) -> list[str]:
    """The names of parameters that are matrices of experts, one matrix for each.

    >>> import torch
    >>> model = nn.ModuleDict({"experts": nn.Module()})
    >>> model.experts.register_parameter("up", nn.Parameter(torch.zeros(4, 3, 2)))
    >>> stacked_experts(model)
    ['experts.up']
    """
    found = loose_matrices(model, lambda path, module: not _of_experts(path, module))
    return [name for name, what in found.items() if what == EXPERTS]


def _of_experts(path: str, module: nn.Module) -> bool:
    """Whether a module holds experts, by its name, its class, or the number that it says."""
    words = path.rpartition(".")[2], type(module).__name__
    says = isinstance(getattr(module, "num_experts", None), int)
    return says or any("expert" in word.lower() for word in words)
