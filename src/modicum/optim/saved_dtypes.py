"""Optimizer state that comes back in the dtypes in which it was saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from modicum.core.errors import InputError
from modicum.core.ranks.sharding import own_part
from modicum.optim.kept import StateShape

_COUNT = "step"


def load_as_saved(
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    kept: Callable[[Tensor], Mapping[str, StateShape]],
) -> None:
    """Take up what `optimizer.state_dict()` gave; tensors keep their dtypes.

    PyTorch would cast them all to the parameter's: codes to floats, fp32 moments to bf16.

    Args:
        kept: what the optimizer keeps of a parameter next to the count of its steps.

    Raises:
        InputError: it is of another optimizer, or something else is there of a parameter; nothing
            is changed by then.
    """
    needed = set(optimizer.defaults).intersection(*optimizer.param_groups)
    for group in state_dict["param_groups"]:
        if missing := needed - group.keys():
            raise InputError(
                f"its groups have no {min(missing)}, so another optimizer saved it; load it into "
                "one of the same method",
                field="state_dict",
            )
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    # Groups of other sizes are refused below, by PyTorch.
    for number, parameter in zip(numbers, own, strict=False):
        _check(parameter, state_dict["state"].get(number, {}), kept(parameter))
    torch.optim.Optimizer.load_state_dict(optimizer, {**state_dict, "state": {}})
    for number, parameter in zip(numbers, own, strict=True):
        for key, value in state_dict["state"].get(number, {}).items():
            device = "cpu" if key == _COUNT else own_part(parameter)[0].device
            optimizer.state[parameter][key] = value.to(device, copy=True)


def _check(parameter: Tensor, saved: Mapping[str, Tensor], kept: Mapping[str, StateShape]) -> None:
    """Refuse what an optimizer does not keep; floats may have other bits, and nothing may be there.

    Nothing is what a matrix has whose turn has not come.
    """
    found = {key: (tuple(value.shape), value.dtype) for key, value in saved.items()}
    found.pop(_COUNT, None)
    alike = found.keys() == kept.keys() and all(
        shape == found[key][0] and _kind(dtype) == _kind(found[key][1])
        for key, (shape, dtype) in kept.items()
    )
    if found and not alike:
        raise InputError(
            f"what was saved of a parameter {tuple(parameter.shape)} is {_words(found)}, and this "
            f"optimizer keeps {_words(kept)}; load it into one with the method and the fields of "
            "the one that saved it",
            field="state_dict",
        )


def _kind(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point else dtype


def _words(shapes: Mapping[str, StateShape]) -> str:
    """Names, shapes and dtypes in a line."""
    said = (
        f"{key} {shape} {str(dtype).removeprefix('torch.')}"
        for key, (shape, dtype) in sorted(shapes.items())
    )
    return ", ".join(said) or "nothing"
