"""A term of the loss that trained weights alone decide, added as its gradient.

A term that is differentiated with the loss is right where a rank has all weights. Where weights are
sharded, or the optimizer trains masters, what autograd gives belongs to something else, and a norm
of a part is no norm. So here a method says what the term and its gradient are, each rank adds the
gradient of the rows that it holds, and what needs full tensors are numbers a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modicum.core.clock import WIRE
from modicum.core.contracts.run_hooks import RunHook
from modicum.core.ranks.ranks import Ranks, peer_errors
from modicum.core.ranks.sharding import own_part, shard_group


class WeightTerm(RunHook):
    """A run hook that adds a term's gradient once an update, before gradients are clipped.

    It is added after they were summed over micro-batches and ranks: so the term counts once,
    whatever number of micro-batches and ranks an update has and however unequal they are. Its value
    is reported as `extra_loss`. A method whose hook this is has the trait `transforms_gradients`.

    Args:
        parameters: what is trained, by name (`Strategy.trained`).
        ranks: those that share the batch.

    >>> class Decay(WeightTerm):
    ...     def term(self):
    ...         squares = row_squares(self.parameters, self.ranks)
    ...         value = 0.05 * float(sum(each.sum() for each in squares.values()))
    ...         return value, ((n, 0.1 * own_part(p)[0]) for n, p in self.parameters.items())
    >>> weight = nn.Parameter(torch.tensor([[3.0, 4.0]]))
    >>> weight.grad = torch.ones(1, 2)
    >>> hook = Decay({"weight": weight})
    >>> value = hook.added_loss()
    >>> hook.after_backward()
    >>> round(value, 4), [round(x, 4) for x in weight.grad[0].tolist()]
    (1.25, [1.3, 1.4])
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], ranks: Ranks | None = None) -> None:
        self.parameters, self.ranks = dict(parameters), ranks or Ranks()
        self._known: tuple[float, Iterable[tuple[str, Tensor]]] | None = None

    def term(self) -> tuple[float, Iterable[tuple[str, Tensor]]]:
        """The term, alike on all ranks, and its gradient.

        Returns:
            The value, and by the parameter's name the gradient of the rows that this rank holds:
            one at a time, as it is asked for.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no term()")

    def added_loss(self) -> float | None:
        """The term, of which each rank reports as large a part."""
        self._known = self.term()
        return self._known[0] / self.ranks.size

    @torch.no_grad()
    def after_backward(self) -> None:
        """Add its gradient to those of the loss."""
        (_, gradients), self._known = self._known or self.term(), None
        for name, rows in gradients:
            parameter = self.parameters[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            own_part(parameter.grad)[0].add_(rows)


@torch.no_grad()
def row_squares(parameters: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """The sum of squares of each row of each full tensor, float64, alike on all ranks.

    What is sharded by rows is exchanged once for all tensors that are sharded over the same ranks;
    a row's sum is made by the rank that has it, so ranks change no bit.

    >>> row_squares({"a": torch.tensor([[3.0, 4.0], [0.0, 1.0]])}, Ranks())["a"].tolist()
    [25.0, 1.0]
    """
    found, groups = {}, dict[int, tuple[dist.ProcessGroup, list[str]]]()
    for name, parameter in parameters.items():
        part, before = own_part(parameter.detach())
        own = torch.linalg.vector_norm(part.flatten(1), dim=1, dtype=torch.float64).square()
        group = shard_group(parameter)
        if group is None:
            found[name] = own
            continue
        found[name] = own.new_zeros(len(parameter))
        found[name][before : before + len(own)] = own
        groups.setdefault(id(group), (group, []))[1].append(name)
    for group, names in groups.values():
        joint = torch.cat([found[name] for name in names])
        with ranks.clock(WIRE), peer_errors():
            dist.all_reduce(joint, group=group)
        sizes = [len(found[name]) for name in names]
        found |= dict(zip(names, joint.split(sizes), strict=True))
    return found
