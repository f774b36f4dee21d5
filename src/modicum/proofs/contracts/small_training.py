"""A small model in training, which the checks of several rooms interrupt and continue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from modicum.core.contracts.parameters import optimizer_groups
from modicum.core.contracts.state import optimizer_state, trained_state

# What a checkpoint of one holds: of the model and of the optimizer, by name.
Saved = dict[str, dict[str, Any]]


class SmallTraining:
    """A model, its optimizer, and what a checkpoint of the two holds.

    Args:
        loss: of a model at the step of this number.
        optimizer: of all that the model trains; None: AdamW.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, int], Tensor],
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.model = model
        self._loss = loss
        if optimizer is None:
            groups = optimizer_groups(model, learning_rate=1e-2, weight_decay=0.1)
            optimizer = torch.optim.AdamW(groups)
        self.optimizer = optimizer
        self.state = {"model": trained_state(model), "optimizer": optimizer_state(optimizer)}

    def backward(self, step: int) -> float:
        """The gradients of step number `step`, and its loss."""
        found = self._loss(self.model, step)
        found.backward()
        return found.item()

    def steps(self, first: int, last: int) -> list[float]:
        """Train from one step to another; the losses."""
        losses = []
        for step in range(first, last):
            losses.append(self.backward(step))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses

    def read(self) -> Saved:
        """A copy of all state."""
        return {name: _copied(read()) for name, (read, _) in self.state.items()}

    def write(self, saved: Saved) -> None:
        """Put all state back."""
        for name, (_, put) in self.state.items():
            put(saved[name])


def assert_resumes(
    start: Callable[[], SmallTraining], again: Callable[[Saved], SmallTraining]
) -> None:
    """Demand that two of four steps, then two of `again`'s training, end in the same bits."""
    uninterrupted, begun = start(), start()
    uninterrupted.steps(0, 4)
    begun.steps(0, 2)
    saved = begun.read()
    continued = again(saved)
    continued.write(saved)
    continued.steps(2, 4)
    found = continued.read()["model"]
    expected = uninterrupted.read()["model"]
    assert found.keys() == expected.keys(), "it holds other tensors after the interruption"
    for name, value in expected.items():
        assert torch.equal(value, found[name]), f"{name} differs after the interruption"


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}


@contextmanager
def constants_stay(model: nn.Module) -> Iterator[None]:
    """Make sure that training writes to no buffer that its module says is constant."""
    held = [
        (f"{path}.{name}", module, name, module.get_buffer(name).clone())
        for path, module in model.named_modules()
        for name in getattr(module, "constant_names", ())
    ]
    yield
    for full, module, name, value in held:
        assert torch.equal(module.get_buffer(name), value), f"{full} is no constant"
