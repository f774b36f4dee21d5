"""Matrices that modules hold themselves, outside of linear layers: routers, stacked experts."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized

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
# What a module may call the number of its experts.
_COUNTS = ("num_experts", "moe_num_experts")


def loose_matrices(model: nn.Module, skip: Callable[[str, nn.Module], bool]) -> dict[str, str]:
    """Parameters that are matrices of no layer, one or stacked, by name, with what they are.

    Args:
        skip: says of a module, by its name and itself, that what it holds counts as a layer's, and
            so does what makes its tensors (parametrizations).

    >>> loose_matrices(nn.LSTM(2, 2), lambda path, module: False)["weight_ih_l0"]
    'a matrix that is no linear layer'
    """
    found: dict[str, str] = {}
    makers: set[nn.Module] = set()
    for path, module in model.named_modules():  # a module comes before its parts
        if isinstance(module, _NO_MATRICES) or module in makers or skip(path, module):
            if is_parametrized(module):
                makers.update(module.get_submodule("parametrizations").modules())
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            if (what := _what(path, module, leaf, parameter)) is not None:
                found[f"{path}.{leaf}" if path else leaf] = what
    return found


def stacked_experts(model: nn.Module) -> list[str]:
    """The names of parameters that are matrices of experts, stacked or one below the other.

    >>> import torch
    >>> model = nn.ModuleDict({"experts": nn.Module()})
    >>> model.experts.register_parameter("up", nn.Parameter(torch.zeros(4, 3, 2)))
    >>> stacked_experts(model)
    ['experts.up']
    """
    found = loose_matrices(model, lambda path, module: not _of_experts(path, module))
    return [name for name, what in found.items() if what == EXPERTS]


def _what(path: str, module: nn.Module, leaf: str, parameter: nn.Parameter) -> str | None:
    """What a parameter of a module is; None: no matrix, or the biases of experts as rows."""
    if isinstance(parameter, UninitializedParameter) or parameter.ndim not in (2, 3):
        return None
    if min(parameter.shape) < 2:
        return None
    of_experts = _of_experts(path, module)
    if parameter.ndim == 3:
        return EXPERTS if of_experts else STACKED
    if of_experts and leaf.endswith("bias"):
        return None
    return EXPERTS if _has_rows_of_experts(path, module, parameter) else MATRIX


def _of_experts(path: str, module: nn.Module) -> bool:
    """Whether a module holds experts, by its name, its class, or the number that it says."""
    return _named_so(path, module) or _count(module) is not None


def _named_so(path: str, module: nn.Module) -> bool:
    """Whether a module's name or class says that it holds experts."""
    words = path.rpartition(".")[2], type(module).__name__
    return any("expert" in word.lower() for word in words)


def _count(module: nn.Module) -> int | None:
    """How many experts a module has, where it says so."""
    said = (getattr(module, name, None) for name in _COUNTS)
    return next((count for count in said if isinstance(count, int)), None)


def _has_rows_of_experts(path: str, module: nn.Module, matrix: nn.Parameter) -> bool:
    """Whether a matrix has several rows for each expert, as in DBRX.

    A router has one row for each, or one column.
    """
    count, (rows, columns) = _count(module), matrix.shape
    if not count or not _named_so(path, module):
        return False
    return rows > count and rows % count == 0 and columns != count
