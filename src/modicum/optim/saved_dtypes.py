"""Optimizer state that comes back: it is checked, and may keep the dtypes in which it was saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    *,
    takes_turns: bool = False,
) -> None:
    """Take up what `optimizer.state_dict()` gave; tensors keep their dtypes.

    PyTorch would cast them all to the parameter's: codes to floats, fp32 moments to bf16.

    Args:
        kept, takes_turns: as for `check_saved`.

    Raises:
        InputError: it is of another optimizer, or something else is there of a parameter; nothing
            is changed by then.
    """
    groups = optimizer.param_groups
    check_saved(groups, optimizer.defaults, state_dict, kept, takes_turns=takes_turns)
    torch.optim.Optimizer.load_state_dict(optimizer, {**state_dict, "state": {}})
    numbers = _listed(state_dict["param_groups"])
    for number, parameter in zip(numbers, _listed(optimizer.param_groups), strict=True):
        for key, value in state_dict["state"].get(number, {}).items():
            device = "cpu" if key == _COUNT else own_part(parameter)[0].device
            optimizer.state[parameter][key] = value.to(device, copy=True)


def check_saved(
    groups: Sequence[Mapping[str, Any]],
    needed: Iterable[str],
    state_dict: Mapping[str, Any],
    kept: Callable[[Tensor], Mapping[str, StateShape]],
    *,
    takes_turns: bool = False,
) -> None:
    """Make sure that what an optimizer is to take up was saved by one that keeps the same.

    Args:
        groups: its own.
        needed: what it asks of a group, where its own have it.
        kept: what it keeps of a parameter next to the count of its steps.
        takes_turns: whether it keeps nothing of a matrix whose turn has not come.

    Raises:
        InputError: it was saved by another.
    """
    asked = set(needed).intersection(*groups)
    for group in state_dict["param_groups"]:
        if missing := asked - group.keys():
            raise InputError(
                f"its groups have no {min(missing)}, so another optimizer saved it; load it into "
                "one of the same method",
                field="state_dict",
            )
    numbers = _listed(state_dict["param_groups"])
    # Groups of other sizes are refused afterwards, by PyTorch.
    for number, parameter in zip(numbers, _listed(groups), strict=False):
        saved = state_dict["state"].get(number, {})
        _check(parameter, saved, kept(parameter), takes_turns=takes_turns)


def _listed(groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [parameter for group in groups for parameter in group["params"]]


def _check(
    parameter: Tensor,
    saved: Mapping[str, Any],
    kept: Mapping[str, StateShape],
    *,
    takes_turns: bool,
) -> None:
    """Refuse what an optimizer does not keep; floats may have other bits.

    Nothing may be there before the first step, and of a matrix whose turn has not come.
    """
    tensors = {key: value for key, value in saved.items() if isinstance(value, Tensor)}
    found = {key: (tuple(t.shape), t.dtype) for key, t in tensors.items() if key != _COUNT}
    alike = found.keys() == kept.keys() and all(
        shape == found[key][0] and _kind(dtype) == _kind(found[key][1])
        for key, (shape, dtype) in kept.items()
    )
    expected = bool(found) or (not takes_turns and int(saved.get(_COUNT, 0)) > 0)
    if expected and not alike:
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
