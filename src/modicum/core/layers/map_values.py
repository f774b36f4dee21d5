"""Values for models that have none: what weights on the meta device make is made up, on the CPU.

Only weights and what is made of them alone stay without memory; all that flows through the model
are numbers, so that a forward pass may look at them, as a mixture of experts does. Knows no module.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from modicum.core.layers.grouped_product import GROUPED, empty_product
from modicum.core.layers.map_calls import tensors
from modicum.core.random import normal_
from modicum.core.torch_private import operators_shown

_PERIOD = 1048573  # a prime, so that rows of a matrix differ where draws repeat


def values_for(model: nn.Module) -> AbstractContextManager[Any]:
    """A context in which a model on the meta device runs on inputs that have values."""
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return operators_shown(_run)
    return nullcontext()


@torch.no_grad()
def fill(tensor: Tensor, name: str, std: float = 1.0) -> Tensor:
    """Fill a tensor in place from N(0, std^2); of a large one a million draws repeat."""
    if tensor.numel() <= _PERIOD or not tensor.is_contiguous():
        return normal_(tensor, seed=0, name=name, std=std)
    flat = tensor.view(-1)
    normal_(flat[:_PERIOD], seed=0, name=name, std=std)
    for start in range(_PERIOD, len(flat), _PERIOD):
        piece = flat[start : start + _PERIOD]
        piece.copy_(flat[: len(piece)])
    return tensor


def made_up(tensor: Tensor) -> Tensor:
    """A tensor on the CPU like one on the meta device: random numbers; zeros of integers."""
    made = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    return fill(made, "input") if made.is_floating_point() else made


def _run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator whose tensors are on the meta device, on the CPU, or on both."""
    given = list(tensors((args, kwargs)))
    onto = kwargs.get("device")
    if not any(tensor.is_meta for tensor in given):
        to_meta = onto is not None and torch.device(onto).type == "meta"
        return operator(*args, **kwargs | ({"device": torch.device("cpu")} if to_meta else {}))
    valued = any(not tensor.is_meta and tensor.ndim for tensor in given)
    valued |= onto is not None and torch.device(onto).type != "meta"
    kept = {name: value for name, value in kwargs.items() if name != "device"}
    if operator.overloadpacket.__name__ == GROUPED and args[0].dtype != torch.bfloat16:
        return empty_product(*_each(args[:3], _on_meta))
    out = operator(*_each(args, _on_meta), **_each(kept, _on_meta))
    name = str(operator.overloadpacket)
    if name.endswith("_") and not name.endswith("__"):
        return args[0]  # which it changes in place
    return _each(out, _valued) if valued else out


def _on_meta(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else torch.empty_like(tensor, device="meta")


def _valued(tensor: Tensor) -> Tensor:
    return made_up(tensor) if tensor.is_meta else tensor


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nested lists, tuples and dicts with each tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_each(item, change) for item in value)
    if isinstance(value, dict):
        return {key: _each(item, change) for key, item in value.items()}
    return value
