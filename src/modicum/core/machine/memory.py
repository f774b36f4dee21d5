"""What memory a run really takes: tensor bytes by allocation events, and the process's size."""

from __future__ import annotations

import gc
import os
import resource
import sys
from array import array
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from modicum.core.extras import library
from modicum.core.ranks.sharding import own_part
from modicum.core.torch_private import (
    begin_allocation_events,
    end_allocation_events,
    storage_address,
)

_MANY = 1 << 14  # events that take as much as a large tensor


class TensorMeter:
    """The peak of tensor bytes on a device while the meter is on.

    On CUDA it is the allocator's own figure. The CPU's allocator keeps none, but reports every
    allocation and release to PyTorch's profiler; the meter adds these up. What is allocated before
    it starts is not seen, so say what that is. Events are kept, two kilobytes for each at the end:
    add them up where few tensors are there, and stop after a few steps. What many of them took is
    given back, so that the process that is measured does not hold it next to its tensors.

    >>> with TensorMeter("cpu") as meter:
    ...     kept = torch.empty(1000)
    ...     _ = torch.empty(500)
    >>> meter.peak
    6000
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.peak: int | None = None
        self._blocks = _Blocks()
        self.running = False

    def __enter__(self) -> TensorMeter:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self, before: int = 0) -> None:
        """Begin, with `before` bytes of tensors there already (which CUDA knows by itself)."""
        self._blocks = _Blocks(before)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # its notices are not for our users
            begin_allocation_events()
        self.running = True

    def add_up(self) -> None:
        """Forget the events so far, but for what they come to; nothing if the meter is off."""
        if self.running and self.device.type != "cuda":
            self._follow()
            begin_allocation_events()

    def stop(self) -> int:
        """End, and return the peak in bytes; a second call returns it again."""
        if not self.running:
            return self.peak or 0
        if self.device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(self.device)
        else:
            self._follow()
            self.peak = self._blocks.peak
        self.running = False
        return self.peak

    def _follow(self) -> None:
        if self._blocks.follow(end_allocation_events()) >= _MANY:
            _trim()


class _Blocks:
    """The blocks allocated and not yet released, and the largest sum of them, by events.

    The profiler's own running total continues from one use to the next within a process, with all
    that was released in between still in it; so the blocks are followed here.

    Args:
        before: bytes of what is there already.
    """

    def __init__(self, before: int = 0) -> None:
        self.peak = self._total = before
        self._live: dict[int, int] = {}

    def follow(self, events: list[Any]) -> int:
        """Add what an event tree of the profiler has; how many events that were."""
        # In columns of numbers: an object for each would add to the process that is measured.
        times, places, sizes = array("q"), array("Q"), array("q")
        pending = list(events)
        while pending:
            event = pending.pop()
            pending += event.children
            if event.tag.name == "Allocation":
                fields = event.extra_fields
                times.append(event.start_time_ns)
                places.append(fields.ptr)
                sizes.append(fields.alloc_size)
        for index in sorted(range(len(times)), key=times.__getitem__):
            place, size = places[index], sizes[index]
            self._total -= self._live.pop(place, 0)
            if size > 0:
                self._live[place] = size
                self._total += size
                self.peak = max(self.peak, self._total)
        return len(times)


def bytes_by_kind(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[Tensor],
    held: Iterable[Tensor] = (),
) -> dict[str, int]:
    """Bytes of what persists: weights (and buffers), gradients that exist now, optimizer state.

    Args:
        optimizer: the optimizer, or the tensors of the state.
        held: weights next to the model's: masters that are trained instead, copies.
    """
    weights = [*model.parameters(), *model.buffers(), *held]
    gradients = [p.grad for p in weights if p.grad is not None]
    if isinstance(optimizer, torch.optim.Optimizer):
        values = [v for state in optimizer.state.values() for v in state.values()]
        optimizer = [value for value in values if isinstance(value, Tensor)]
    state = list(optimizer)
    return {
        "weight": tensor_bytes(weights),
        "gradient": tensor_bytes(gradients),
        "optimizer": tensor_bytes(state),
    }


def tensor_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the tensors' storages, shared ones once; of sharded ones, what this rank holds."""
    parts = [own_part(tensor)[0] for tensor in tensors]
    storages = {storage_address(t): t.untyped_storage().nbytes() for t in parts}
    return sum(storages.values())


def resident_bytes() -> int:
    """The process's resident size now."""
    return int(library("psutil", "cli", "a plan").Process().memory_info().rss)


def forget_peak() -> None:
    """Let the largest resident size be that from now on, where the system can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_bytes(b"5")


def used_bytes(device: str) -> int:
    """What a memory budget counts, now: the allocator's memory on CUDA, else the process's size."""
    return torch.cuda.memory_reserved() if device == "cuda" else resident_bytes()


def peak_resident_bytes() -> int:
    """The process's largest resident size so far, or since `forget_peak`."""
    # What psutil has not; and `ru_maxrss` also knows the program that this one replaced.
    with suppress(OSError):
        for line in Path("/proc/self/status").read_bytes().splitlines():
            if line.startswith(b"VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def limited() -> bool:
    """Whether this process may hold less than the machine has: allocations then fail.

    Where it may not, as is usual, the system ends a process instead.
    """
    kinds = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    return any(resource.getrlimit(kind)[0] != resource.RLIM_INFINITY for kind in kinds)


def release() -> None:
    """Give memory that is free inside the process back to the system, where that is possible."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    _trim()


def _trim() -> None:
    """Give back what is free in the C library's heap."""
    if sys.platform == "linux":
        import ctypes

        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
