"""An optimizer's step over some of its parameters: in the backward pass, or just before use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from modicum.core.contracts.parameters import settle


class Stepper:
    """Steps any `torch.optim.Optimizer` over a subset of its parameters at a time.

    An optimizer keeps its state by parameter, so a step over parts, one after the other, is the
    step over all of them, as long as its rule looks at one parameter at a time.

    >>> one, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    >>> stepper = Stepper(torch.optim.SGD([one, other], lr=0.5))
    >>> one.grad, other.grad = torch.ones(2), torch.ones(2)
    >>> stepper.step([one])
    >>> one.tolist(), other.tolist()
    ([0.5, 0.5], [1.0, 1.0])
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._groups = {
            id(parameter): index
            for index, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        # Profiling and step hooks are for full steps, and cost more than a small tensor's update.
        step: Callable[..., Any] = type(optimizer).step
        self._step = getattr(step, "__wrapped__", step)

    def settings(self) -> list[dict[str, Any]]:
        """The groups' present hyper-parameters, for a deferred step; of tensors, copies."""
        kept = ("params", "names", "param_names")
        return [
            {key: _copied(value) for key, value in group.items() if key not in kept}
            for group in self.optimizer.param_groups
        ]

    def step(
        self,
        parameters: Iterable[nn.Parameter],
        settings: list[dict[str, Any]] | None = None,
    ) -> None:
        """Update these parameters by their gradients; parameters of no group are passed over.

        Args:
            settings: hyper-parameters as `settings` gave them, where they are no longer the groups'
                own (a schedule advanced).
        """
        chosen: dict[int, list[nn.Parameter]] = {}
        for parameter in parameters:
            if (index := self._groups.get(id(parameter))) is not None:
                chosen.setdefault(index, []).append(parameter)
        whole = self.optimizer.param_groups
        self.optimizer.param_groups = [
            {**whole[index], **self._then(settings, index), "params": some}
            for index, some in chosen.items()
        ]
        try:
            with torch.no_grad():
                self._step(self.optimizer)
            for some in chosen.values():
                settle(some)
        finally:
            self.optimizer.param_groups = whole

    def _then(self, settings: list[dict[str, Any]] | None, index: int) -> Mapping[str, Any]:
        return {} if settings is None else settings[index]


def _copied(value: Any) -> Any:
    """A hyper-parameter that a schedule cannot change in place any more."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return tuple(map(_copied, value)) if type(value) is tuple else value
