"""Gradients of sharded parameters that wait until the sum that FSDP2 was given has landed.

FSDP2 takes a buffer as the sharded gradients while their sum is on the wire, and adds it to what is
there. So what is there is laid aside: the gradients of earlier micro-batches, and those of a term
of the loss that reads the sharded parameters themselves, which autograd adds on its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.ranks.sharding import own_part


class LaidAside:
    """What was laid aside, by what FSDP2 sums at once.

    Args:
        replicas: of the shards. FSDP2 sums over them what blocks compute, and nothing else.

    Attributes:
        read: parameters that have had gradients of their own, which no rank sums.
    """

    def __init__(self, replicas: int = 1) -> None:
        self._replicas = replicas
        self._members: dict[str, list[nn.Parameter]] = {}
        self._kept: dict[str, list[tuple[nn.Parameter, Tensor]]] = {}
        self.read: set[nn.Parameter] = set()

    def follow(self, label: str, parameters: Iterable[nn.Parameter]) -> None:
        """Take up the trained parameters of what is summed at once, each of which comes once."""
        self._members[label] = members = list(parameters)
        for parameter in members:
            parameter.register_hook(partial(self._reached, label, parameter))

    def _reached(self, label: str, parameter: nn.Parameter, _: Tensor) -> None:
        """Autograd is about to add to a sharded gradient, which it does in place.

        Raises:
            InputError: others hold the same rows, and would add something else.
        """
        if self._replicas > 1:
            raise InputError(
                "with hybrid sharding gradients of a term that reads sharded weights are not "
                "summed over hosts; shard the weights over all ranks",
                field="parallel.shard",
            )
        self.read.add(parameter)
        if label in self._kept:
            self._lay(label, parameter)

    def lay(self, label: str) -> None:
        """A sum begins, and FSDP2 is about to take its buffer as the gradients."""
        self._kept[label] = []
        for parameter in self._members[label]:
            self._lay(label, parameter)

    def _lay(self, label: str, parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            self._kept[label].append((parameter, parameter.grad))
            parameter.grad = None

    def add(self, label: str) -> None:
        """A sum has landed in the buffer."""
        for parameter, gradient in self._kept.pop(label, ()):
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                own_part(parameter.grad)[0].add_(own_part(gradient)[0])

    def clear(self) -> None:
        """Forget it, as all gradients were let go of."""
        self._kept.clear()
        self.read.clear()
