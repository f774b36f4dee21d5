"""What a proof counts: bytes that autograd saves, and seconds, taken in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modicum.core.torch_private import storage_address


@dataclass
class SavedBytes:
    """Bytes of the storages that autograd saved for the backward pass, each counted once."""

    storages: dict[int, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """The sum over the storages."""
        return sum(self.storages.values())


@contextmanager
def saved_bytes(apart: Iterable[Tensor] = ()) -> Iterator[SavedBytes]:
    """Count what is saved in here, such as by a forward pass.

    Args:
        apart: tensors that are there anyway, such as parameters, and are not counted.

    >>> x = torch.ones(8, requires_grad=True)
    >>> with saved_bytes([x]) as saved:
    ...     y = (2 * x).square().sum()
    >>> saved.total
    32
    """
    known, found, kept = {storage_address(tensor) for tensor in apart}, SavedBytes(), []

    def keep(tensor: Tensor) -> Tensor:
        for part in _dense_parts(tensor):
            address = storage_address(part)
            if address not in known:
                found.storages[address] = part.untyped_storage().nbytes()
                kept.append(part)  # or another storage would come to its address
        return tensor.detach()  # an output that its own graph holds would never be freed

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found
    kept.clear()


def _dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """What has the numbers of a tensor: itself, or of a sparse one copies of its two parts."""
    if tensor.layout is not torch.sparse_coo:
        return (tensor,)
    sparse = tensor.detach().coalesce()
    return sparse.indices(), sparse.values()


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one of several things that were timed in turns."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.seconds)

    @property
    def fastest(self) -> float:
        """The one that other processes disturbed the least."""
        return min(self.seconds)


def in_turns(
    steps: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    warm_up: int = 1,
    before: Callable[[str], object] | None = None,
    after: Callable[[str, bool], object] | None = None,
) -> dict[str, StepTimes]:
    """Seconds of each step, taken in turns, so that a busy machine slows all alike.

    Args:
        warm_up: turns that are not counted.
        before, after: are called with the step's label outside of the time that is taken; `after`
            also with whether the turn counts.
    """
    taken: dict[str, list[float]] = {label: [] for label in steps}
    for turn in range(warm_up + repeats):
        for label, step in steps.items():
            if before is not None:
                before(label)
            started = time.perf_counter()
            step()
            seconds = time.perf_counter() - started
            if turn >= warm_up:
                taken[label].append(seconds)
            if after is not None:
                after(label, turn >= warm_up)
    return {label: StepTimes(tuple(seconds)) for label, seconds in taken.items()}
