"""Functional collectives whose calls are recorded: those of DTensor, and of compiled code.

`torch.distributed._functional_collectives`, by which DTensor sums a norm, runs operators of C++
that find a group by its name, past the methods that are wrapped. While somebody observes, these
operators run a kernel in Python: the same one with the name of a group that forwards to methods
that are recorded. Kernels are beneath autograd, and no part of what a compiler traces: graphs are
the same, and where one calls such an operator, that call is seen as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor

from modicum.core.ranks.forwarding_group import ForwardingGroup
from modicum.core.ranks.observed_calls import observed
from modicum.core.torch_private import (
    functional_collectives,
    functional_wait,
    give_name,
    group_of,
    kernel_of,
    lend_backends,
    place_of_group,
    run_instead,
    storage_address,
)

_groups: WeakKeyDictionary[Any, _NamedGroup] = WeakKeyDictionary()
# What is to be waited for, by the storage of its result; C++ keeps it until then.
_works: WeakValueDictionary[int, Any] = WeakValueDictionary()
_issued = threading.local()
_numbers = count()
_lock = threading.Lock()


class _NamedGroup(ForwardingGroup):
    """A group that C++ finds by a name, and that notes what it has issued."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        lend_backends(group, self)
        self.known_as = f"observed {next(_numbers)}"
        finalize(self, give_name(self, self.known_as)).atexit = False

    def _forward(self, name: str, *arguments: Any) -> Any:
        _issued.work = super()._forward(name, *arguments)
        return _issued.work


def see_functional_calls(waiting: Callable[[Any, Callable[[], Any]], Any]) -> Callable[[], None]:
    """Have functional collectives call methods of groups in Python; what is given ends that.

    Args:
        waiting: given what such a method gave and what waits for it, does so.
    """
    issuing = {operator: _issuing(operator) for operator in functional_collectives()}
    kernels = issuing | {functional_wait(): _waiting(waiting)}
    captured = {operator: _captured(operator, kernel) for operator, kernel in kernels.items()}
    undo = [run_instead(kernels, "CPU"), run_instead(captured, "CUDA")]

    def end() -> None:
        for each in undo:
            each()
        _groups.clear()

    return end


def _issuing(operator: Any) -> Callable[..., Any]:
    """An operator's kernel, by a group that forwards."""
    kernel = kernel_of(operator)
    at = place_of_group(operator)

    def issue(*arguments: Any, **named: Any) -> Any:
        name = _name_for(arguments[at]) if observed() else None
        if name is None:
            return kernel(*arguments, **named)
        _issued.work = None
        results = kernel(*arguments[:at], name, *arguments[at + 1 :], **named)
        work, _issued.work = _issued.work, None
        if work is not None:
            for result in [results] if isinstance(results, Tensor) else results:
                _works[storage_address(result)] = work
        return results

    return issue


def _waiting(waiting: Callable[[Any, Callable[[], Any]], Any]) -> Callable[[Tensor], Any]:
    kernel = kernel_of(functional_wait())

    def wait(tensor: Tensor) -> Any:
        work = _works.pop(storage_address(tensor), None)
        return kernel(tensor) if work is None else waiting(work, partial(kernel, tensor))

    return wait


def _captured(operator: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that leaves alone what a CUDA graph records, which is played without Python."""
    own = kernel_of(operator)

    def run(*arguments: Any, **named: Any) -> Any:
        capturing = torch.cuda.is_current_stream_capturing()
        return (own if capturing else kernel)(*arguments, **named)

    return run


def _name_for(group: Any) -> str | None:
    """The name of a group that forwards; None: it is written in Python itself."""
    if isinstance(group, str):
        group = group_of(group)
    if type(group) is not dist.ProcessGroup:
        return None
    with _lock:
        named = _groups.get(group)
        if named is None:
            named = _groups[group] = _NamedGroup(group)
    return named.known_as
