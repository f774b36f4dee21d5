"""Process groups whose calls are recorded, those of PyTorch's DistributedDataParallel among them.

`observing(observer)` shows an observer every collective of this process: modicum's own, FSDP2's,
DDP's, DTensor's (a norm's in `clip_grad_norm_`), those of a script and of compiled code, and every
message that one rank sends to another (`dist.send`, `isend`, `batch_isend_irecv`), at both ends;
not what is received from whoever sends. Tensors and orders are left as they are, so results are the
same to the bit, and afterwards nothing is wrapped.

Not seen are: `monitored_barrier` and `new_group`; what a CUDA graph plays again; messages of
functional collectives (`isend`, `irecv`); `all_gather_into_tensor_out` of these, which compilers
alone call, before torch 2.14; operators of symmetric memory; and functional collectives on other
devices than processors and CUDA, or of a group that is written in Python.

    with observing(CallLog()) as log:
        dist.all_reduce(tensor)
    log.calls[0].kind, log.calls[0].ended - log.calls[0].begun

Python's callers find a group's methods on its class; there they are wrapped while somebody
observes. DDP's reducer and functional collectives (`functional_calls`) call from C++, past the
class: they are given a group written in Python, which forwards to the one that they would have
used. The buffers that DDP broadcasts before a forward pass are one call.
"""

from __future__ import annotations

import atexit
import gc
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from modicum.core.ranks.forwarding_group import ForwardingGroup
from modicum.core.ranks.functional_calls import see_functional_calls
from modicum.core.ranks.observed_calls import (
    MESSAGES,
    RECEIVE,
    SEND,
    CallNote,
    CallObserver,
    ObservedCall,
    link_name,
    listed,
    named,
    noted,
    noting,
    observed,
    show_begun,
    show_ended,
)
from modicum.core.torch_private import set_reducer_group

# By the method of a group: the collective, and which argument holds what this rank gives.
METHODS = {
    "allreduce": ("all-reduce", 0),
    "allreduce_coalesced": ("all-reduce", 0),
    "allgather": ("all-gather", 1),
    "allgather_coalesced": ("all-gather", 1),
    "allgather_into_tensor_coalesced": ("all-gather", 1),
    "_allgather_base": ("all-gather", 1),
    "all_gather_single": ("all-gather", 1),
    "all_gather_single_coalesced": ("all-gather", 1),
    "reduce_scatter": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce-scatter", 1),
    "_reduce_scatter_base": ("reduce-scatter", 1),
    "reduce_scatter_single": ("reduce-scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce-scatter", 1),
    "alltoall": ("all-to-all", 1),
    "alltoall_base": ("all-to-all", 1),
    "all_to_all_single": ("all-to-all", 1),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "gather": ("gather", 1),
    "scatter": ("scatter", 1),
    "barrier": ("barrier", 0),
}
BROADCAST_BUFFERS = "_distributed_broadcast_coalesced"  # DDP's, before a forward pass

Observer = TypeVar("Observer", bound=CallObserver)
_originals: dict[tuple[type, str], Any] = {}
_endings: list[Callable[[], None]] = []
_groups: WeakKeyDictionary[Any, _SeenGroup] = WeakKeyDictionary()
_known: dict[tuple[str, tuple[int, ...]], _SeenGroup] = {}  # by name and members
_works: WeakKeyDictionary[Any, tuple[ObservedCall, tuple[CallObserver, ...]]] = WeakKeyDictionary()
# By model: in C++ a group written in Python is none once nothing in Python refers to it.
_reducers: WeakKeyDictionary[DistributedDataParallel, ForwardingGroup] = WeakKeyDictionary()
# What threads of backends call at the ends of calls; each is gone once it was called.
_ends: WeakSet[partial[None]] = WeakSet()
_lock = threading.Lock()


class _SeenGroup:
    """A group's name and members, and how many calls it had."""

    def __init__(self, group: Any) -> None:
        try:
            members = dist.get_process_group_ranks(group)
        except (KeyError, RuntimeError, ValueError):  # one that is still being made
            members = []
        self.members = tuple(members) or tuple(range(group.size()))
        self.name, self.size, self.rank = str(group.group_name), group.size(), group.rank()
        self.calls, self._links = 0, dict[tuple[str, int, int], _SeenEnd]()
        self.has_futures = True  # of messages

    def link(self, kind: str, peer: int, tag: int) -> _SeenEnd:
        """This rank's end of the link to a peer, or from one."""
        if (kind, peer, tag) not in self._links:
            here, there = self.members[self.rank], self.members[peer]
            source, target = (here, there) if kind == SEND else (there, here)
            name = link_name(self.name, source, target, tag)
            self._links[kind, peer, tag] = _SeenEnd(name, (source, target))
        return self._links[kind, peer, tag]


@dataclass
class _SeenEnd:
    """This rank's end of a link, and how many messages it has sent or received there."""

    name: str
    ends: tuple[int, int]
    messages: int = 0


@contextmanager
def observing(observer: Observer) -> Iterator[Observer]:
    """Show `observer` every call from here on, until the end of the block."""
    begin_observing(observer)
    try:
        yield observer
    finally:
        end_observing(observer)


def begin_observing(observer: CallObserver) -> None:
    """Show `observer` every call from here on."""
    if not observed():
        _known.clear()  # a group that is gone may have been observed by some of its ranks alone
        _see_groups(see=True)
    listed(observer, seeing=True)


def end_observing(observer: CallObserver) -> None:
    """Show `observer` nothing more, but the ends of calls that it has seen begin."""
    if not listed(observer, seeing=False):
        _see_groups(see=False)


def _see_groups(*, see: bool) -> None:
    """Wrap the methods of process groups, or take the wrappers away."""
    if not see:
        for (owner, name), original in _originals.items():
            setattr(owner, name, original)
        _originals.clear()
        while _endings:
            _endings.pop()()
        for model in list(_reducers):
            set_reducer_group(model, model.process_group)
        _reducers.clear()
        return
    atexit.unregister(wait_for_ends)
    atexit.register(wait_for_ends)
    for name, (kind, given) in METHODS.items():
        if hasattr(dist.ProcessGroup, name):
            _wrap(dist.ProcessGroup, name, partial(_recorded, kind, given))
    for kind in (SEND, RECEIVE):
        _wrap(dist.ProcessGroup, kind, partial(_recorded_message, kind))
    _wrap(dist.Work, "wait", _waited)
    _endings.append(see_functional_calls(_noted_wait))
    _wrap(DistributedDataParallel, "__init__", _seen_ddp)
    _wrap(DistributedDataParallel, BROADCAST_BUFFERS, _seen_buffers)
    for model in _models():
        _see_reducer(model)


def _wrap(owner: type, name: str, made: Callable[[Any], Any]) -> None:
    _originals[owner, name] = vars(owner)[name]  # what `getattr` gives would not bind again
    original = getattr(owner, name)
    setattr(owner, name, wraps(original)(made(original)))


def _recorded(kind: str, given: int, original: Any) -> Any:
    """A method of groups that records its calls."""

    def call(group: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(group, ForwardingGroup) or not observed():
            return original(group, *arguments, **named)
        values = [*arguments, *named.values()]
        record = _record(group, kind, _tensors(values[given : given + 1]), values)
        seeing = show_begun(record)
        work = original(group, *arguments, **named)
        _follow(record, seeing, work)
        return work

    return call


def _record(group: Any, kind: str, tensors: Iterable[Tensor], values: list[Any]) -> ObservedCall:
    """The record of a call that is about to be issued."""
    note, now = noted(), time.monotonic()
    with _lock:
        seen = _seen_group(group)
        sequence, seen.calls = seen.calls, seen.calls + 1
    if note is not None:
        kind, label, sent, asked = note.kind, note.label, note.bytes, note.asked
    else:
        label, asked = named(), now
        payload = sum(tensor.nbytes for tensor in tensors)
        root = next((value.rootRank for value in values if hasattr(value, "rootRank")), None)
        sent = ring_bytes(kind, payload, seen.size, is_root=root == seen.rank)
    call = ObservedCall(sequence, kind, seen.name, seen.members, label, sent, asked, now)
    call.due = call.due if note is None else note.due
    return call


def _seen_group(group: Any) -> _SeenGroup:
    seen = _groups.get(group)
    if seen is None:
        fresh = _SeenGroup(group)
        # After `destroy_process_group` names are given again; then the count of calls continues.
        seen = _groups[group] = _known.setdefault((fresh.name, fresh.members), fresh)
    return seen


def _recorded_message(kind: str, original: Any) -> Any:
    """A method of groups that sends to one rank, or receives from one, and records that.

    gloo does not say when such a message has come: it has ended when it was waited for.
    """

    def call(group: Any, tensors: Any, peer: int, tag: int = 0) -> Any:
        if isinstance(group, ForwardingGroup) or not observed():
            return original(group, tensors, peer, tag)
        with _lock:
            seen = _seen_group(group)
            link = seen.link(kind, peer, tag)
            sequence, link.messages = link.messages, link.messages + 1
        sent = sum(tensor.nbytes for tensor in tensors) if kind == SEND else 0
        now = time.monotonic()
        record = ObservedCall(sequence, kind, link.name, link.ends, named(), sent, now, now)
        seeing = show_begun(record)
        work = original(group, tensors, peer, tag)
        _follow(record, seeing, work, seen)
        return work

    return call


def ring_bytes(kind: str, given: int, size: int, *, is_root: bool = False) -> int:
    """Bytes that a rank of `size` sends that gives so many to a collective.

    >>> ring_bytes("all-reduce", 100, 4), ring_bytes("all-gather", 100, 4)
    (150, 300)
    """
    if kind == "all-reduce":
        return 2 * (size - 1) * given // size
    if kind == "all-gather":
        return (size - 1) * given
    if kind in ("reduce-scatter", "all-to-all"):
        return given - given // size
    if kind == "broadcast":
        return (size - 1) * given if is_root else 0
    if kind == "scatter":
        return given - given // size if is_root else 0
    return 0 if is_root else given


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _follow(
    call: ObservedCall, seeing: tuple[CallObserver, ...], work: Any, group: _SeenGroup | None = None
) -> None:
    """Have the end of a call noted when it is there, by whichever thread.

    Args:
        group: of a message, where it is noted whether its backend says so at all.
    """
    if work is None:  # a part of several that are issued together
        show_ended(call, seeing)
        return
    _works[work] = (call, seeing)

    if group is not None and not group.has_futures:
        return
    ended = partial(_note_end, call, seeing)
    try:
        _ends.add(ended)
        work.get_future().add_done_callback(ended)
    except RuntimeError:  # a backend that has none; then waiting for it is its end
        if group is not None:
            group.has_futures = False


def _note_end(call: ObservedCall, seeing: tuple[CallObserver, ...], future: Any) -> None:
    with suppress(Exception):  # one that failed has not ended
        future.value()
        show_ended(call, seeing)


def wait_for_ends() -> None:
    """Wait for calls that have not ended, as a process that ends does where nobody observes.

    A backend's thread that notes an end when the interpreter is gone would abort the process.
    """
    open_calls = True
    while open_calls:
        open_calls = bool(_ends)
        time.sleep(0.01)  # once more after the last: its thread is about to leave Python


os.register_at_fork(after_in_child=_ends.clear)  # no thread is there that would call them


def _waited(original: Any) -> Any:
    """`Work.wait` that notes how long it took."""

    def wait(work: Any, *arguments: Any, **named: Any) -> Any:
        return _noted_wait(work, partial(original, work, *arguments, **named))

    return wait


def _noted_wait(work: Any, wait: Callable[[], Any]) -> Any:
    """Wait for a call, and note how long that took."""
    call, seeing = _works.get(work, (None, ()))
    if call is None:
        return wait()
    begun = time.monotonic()
    if call.kind in MESSAGES and not call.done:
        call.awaited = begun
        for observer in seeing:  # what they do now costs nobody time: it travels
            observer.changed(call)
    result = wait()
    call.waited += time.monotonic() - begun
    if call.done:
        for observer in seeing:
            observer.changed(call)
    show_ended(call, seeing)
    return result


def _seen_ddp(original: Any) -> Any:
    """DDP's constructor, after which the reducer's calls are seen."""

    def construct(model: Any, *arguments: Any, **named: Any) -> None:
        original(model, *arguments, **named)
        _see_reducer(model)

    return construct


def _seen_buffers(original: Any) -> Any:
    """What broadcasts a model's buffers, which returns when they are there."""

    def broadcast(model: Any, tensors: list[Tensor], size: int, source: int = 0) -> None:
        if not observed() or not tensors:
            original(model, tensors, size, source)
            return
        group = model.process_group
        sent = sum(tensor.nbytes for tensor in tensors)
        is_root = source == group.rank()
        sent = ring_bytes("broadcast", sent, group.size(), is_root=is_root)
        with noting(CallNote("broadcast", "buffers", sent, time.monotonic())):
            record = _record(group, "broadcast", [], [])
        seeing = show_begun(record)
        original(model, tensors, size, source)
        show_ended(record, seeing)

    return broadcast


def _see_reducer(model: DistributedDataParallel) -> None:
    _reducers[model] = ForwardingGroup(model.process_group)
    set_reducer_group(model, _reducers[model])


def _models() -> list[DistributedDataParallel]:
    """The models that were wrapped before anybody observed."""
    return [value for value in gc.get_objects() if issubclass(type(value), DistributedDataParallel)]
