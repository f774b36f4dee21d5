"""Optimizer state that comes back in the dtypes in which it was saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from modicum.core.ranks.sharding import own_part


def load_as_saved(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Take up what `optimizer.state_dict()` gave; tensors keep their dtypes.

    PyTorch would cast them all to the parameter's: codes to floats, fp32 moments to bf16.
    """
    torch.optim.Optimizer.load_state_dict(optimizer, {**state_dict, "state": {}})
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = (number for group in state_dict["param_groups"] for number in group["params"])
    for number, parameter in zip(numbers, own, strict=True):
        for key, value in state_dict["state"].get(number, {}).items():
            device = "cpu" if key == "step" else own_part(parameter)[0].device
            optimizer.state[parameter][key] = value.to(device, copy=True)
