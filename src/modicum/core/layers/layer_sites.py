"""What rooms ask of single layers: who uses a weight, how it is stored, which ones convolve.

Knows no adapter, no compression and no policy.
"""

from __future__ import annotations

from torch import nn


def weight_users(model: nn.Module) -> dict[int, list[tuple[str, nn.Module]]]:
    """For each parameter, by its id, the modules that hold it, under all names that they have.

    >>> one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> other.weight = one.weight
    >>> model = nn.Sequential(one, other)
    >>> [name for name, _ in weight_users(model)[id(one.weight)]]
    ['0', '1']
    """
    users: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), []).append((name, module))
    return users


def transposed_sizes(
    module: nn.Module, kind: type[nn.Module] | None = None
) -> tuple[int, int] | None:
    """Inputs and outputs of a layer that stores W^T, the `Conv1D` of GPT-2; None for any other.

    Args:
        kind: the class that the layer counts as; its own by default.

    >>> transposed_sizes(nn.Linear(2, 3))
    """
    if (kind or type(module)).__name__ != "Conv1D" or not isinstance(
        getattr(module, "nf", None), int
    ):
        return None
    rows, columns = module.get_parameter("weight").shape
    return rows, columns


def convolutions_of(model: nn.Module) -> list[tuple[str, nn.Conv1d | nn.Conv2d | nn.Conv3d]]:
    """The convolutions of a model, by name.

    >>> convolutions_of(nn.Sequential(nn.ReLU(), nn.Conv2d(1, 2, 3)))[0][0]
    '1'
    """
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    ]
