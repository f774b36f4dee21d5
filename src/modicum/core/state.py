"""The state of a run as one registry of named views; snapshots and resume read this list alone.

A view is something that gives its state as tensors and plain values and takes it back. Nothing is
pickled: tensors go to safetensors, the rest to JSON, so a state dictionary is flattened to dotted
names and both kinds are told apart here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from modicum.core.errors import InputError


class Stateful(Protocol):
    """What a view stands on: any object with `state_dict` and `load_state_dict`."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Any) -> Any: ...


@dataclass(frozen=True)
class View:
    """A named part of the run's state; `read` gives tensors and JSON values by dotted name."""

    name: str
    read: Callable[[], Mapping[str, Any]]
    write: Callable[[Mapping[str, Any]], None]


@dataclass
class StateRegistry:
    """Every view of the run's state, by name.

    >>> registry = StateRegistry()
    >>> counter = {"count": 3}
    >>> registry.add("counter", lambda: dict(counter), counter.update)
    >>> saved = registry.read()
    >>> counter["count"] = 9
    >>> registry.write(saved)
    >>> counter
    {'count': 3}
    """

    views: dict[str, View] = field(default_factory=dict)

    def add(
        self,
        name: str,
        read: Callable[[], Mapping[str, Any]],
        write: Callable[[Mapping[str, Any]], Any],
    ) -> None:
        """Register a view. Names are unique."""
        if name in self.views:
            raise ValueError(f"the state {name!r} is registered already")
        self.views[name] = View(name, read, write)

    def add_object(self, name: str, owner: Stateful) -> None:
        """Register an object with `state_dict` and `load_state_dict`."""
        self.add(name, owner.state_dict, owner.load_state_dict)

    def read(self) -> dict[str, Mapping[str, Any]]:
        """The whole state: view name to its dictionary. Tensors are views, not copies."""
        return {name: view.read() for name, view in self.views.items()}

    def write(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Put a whole state back.

        Raises:
            InputError: a view has no state there, or there is state that nobody owns.
        """
        missing, unknown = self.views.keys() - state.keys(), state.keys() - self.views.keys()
        if missing or unknown:
            problem = f"holds no state for {sorted(missing)}" if missing else ""
            problem += f"{' and ' if missing and unknown else ''}"
            problem += f"holds state that nobody asks for: {sorted(unknown)}" if unknown else ""
            raise InputError(f"the checkpoint does not match this run: it {problem}")
        for name, view in self.views.items():
            view.write(state[name])


def trained_state(model: nn.Module) -> tuple[Callable[[], dict[str, Tensor]], Callable[..., None]]:
    """Reader and writer of what training changes in a model: trained parameters and buffers.

    Frozen parameters are the base model's and stay where they came from.
    """

    def tensors() -> dict[str, Tensor]:
        persistent = set(model.state_dict(keep_vars=True))
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        return parameters | {name: b for name, b in model.named_buffers() if name in persistent}

    def read() -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in tensors().items()}

    def write(state: Mapping[str, Tensor]) -> None:
        own = tensors()
        if own.keys() != state.keys():
            different = sorted(own.keys() ^ state.keys())[:3]
            raise InputError(f"the checkpoint holds other parameters than the model: {different}")
        with torch.no_grad():
            for name, tensor in own.items():
                if tensor.shape != state[name].shape or tensor.dtype != state[name].dtype:
                    raise InputError(
                        f"the checkpoint's {name} is {tuple(state[name].shape)} "
                        f"{state[name].dtype}, the model's {tuple(tensor.shape)} {tensor.dtype}"
                    )
                tensor.copy_(state[name])

    return read, write


def optimizer_state(
    optimizer: torch.optim.Optimizer,
) -> tuple[Callable[[], dict[str, Any]], Callable[..., None]]:
    """Reader and writer of an optimizer's state by parameter *name* (`names` of its groups).

    Names survive a change in the order or the grouping of parameters; indices do not.
    """

    def named() -> dict[str, nn.Parameter]:
        return {
            name: parameter
            for group in optimizer.param_groups
            for name, parameter in zip(group["names"], group["params"], strict=True)
        }

    def read() -> dict[str, Any]:
        return {
            f"{name}/{key}": value
            for name, parameter in named().items()
            for key, value in optimizer.state.get(parameter, {}).items()
        }

    def write(state: Mapping[str, Any]) -> None:
        own = named()
        optimizer.state.clear()
        for full, value in state.items():
            name, key = full.rsplit("/", 1)
            if name not in own:
                raise InputError(f"the checkpoint has optimizer state for {name!r}, unknown here")
            if isinstance(value, Tensor) and key != "step":
                value = value.to(own[name].device)
            optimizer.state[own[name]][key] = value.clone() if isinstance(value, Tensor) else value

    return read, write


def random_state() -> tuple[Callable[[], dict[str, Any]], Callable[..., None]]:
    """Reader and writer of torch's own generators: the CPU's and every accelerator's."""

    def read() -> dict[str, Any]:
        state: dict[str, Any] = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            for index, value in enumerate(torch.cuda.get_rng_state_all()):
                state[f"cuda{index}"] = value
        return state

    def write(state: Mapping[str, Any]) -> None:
        torch.set_rng_state(state["cpu"])
        if torch.cuda.is_available():
            saved = [value for name, value in state.items() if name.startswith("cuda")]
            if len(saved) == torch.cuda.device_count():
                torch.cuda.set_rng_state_all(saved)

    return read, write
