"""What one pass of a program takes, seen on tensors without memory: bytes that come and go.

A forward and a backward pass run under fake tensors, with the run's own device, dtypes, autocast,
attention kernel and recomputation. Every storage that an operation makes is a move of so many
bytes, and so is its end. What a kernel works in is in no tensor: of products in bf16 the trace has
the sizes, and the machine's record the bytes.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from modicum.core.layers.grouped_product import GROUPED, empty_product
from modicum.core.layers.trace_moves import (
    OUTSIDE,
    Gradient,
    Pass,
    Release,
    Scratch,
    TracedPart,
    TracedPass,
    change,
    flops_of,
    ordered,
    scratch_of,
    tensors_in,
)
from modicum.core.torch_private import (
    adds_in_place,
    counts_of_a_sole_gradient,
    fake_tensors,
    running_operations,
    storage_address,
)

RowsGiven = Callable[[str, tuple[int, ...]], int]
"""Says how many rows an operation gives, by its name and the shape of what it reads."""
Around = Callable[[nn.Module, Callable[[Scratch], None]], AbstractContextManager[object]]
"""Gives the context of a model's forward pass; calls what it is given where it takes scratch."""
_DATA_DECIDES = ("nonzero", "_local_scalar_dense")
_COPIES = ("new_empty_strided", "clone")
_GROUP_NORM = "native_group_norm_backward"
_DEVICE = torch.ops.prim.device.default


class ByteTrace:
    """Follows every storage from the operation that makes it to its end, in parts.

    >>> trace = ByteTrace()
    >>> with fake_tensors(), trace.following():
    ...     kept = torch.empty(1000)
    ...     del kept
    >>> [part.moves for part in trace.parts]
    [[4000, Release(bytes=4000, block='', number=0)]]
    """

    def __init__(self, rows: RowsGiven | None = None) -> None:
        self._next = TracedPart(OUTSIDE, "forward")
        self.parts = [self._next]
        self._live: dict[int, weakref.ref[Any]] = {}
        self._rows = rows
        counts_of_a_sole_gradient()
        self._made = 0
        self._last = ""  # the operation that made the last move

    def begin(self, block: str, during: Pass) -> None:
        """With the next operation another part begins; what ends before is still of this one."""
        self._next = TracedPart(block, during)

    @property
    def during(self) -> Pass:
        """The pass that is under way."""
        return self._next.during

    def known(self, tensors: Iterable[Tensor]) -> None:
        """These are there already: neither they nor their end is a move."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._live.setdefault(storage_address(tensor), weakref.ref(storage))

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow what runs in here."""
        collecting = gc.isenabled()
        gc.disable()  # or cycles end at moments that differ from pass to pass
        try:
            with running_operations(self._run):
                yield
        finally:
            if collecting:
                gc.enable()

    def _run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if operation is _DEVICE:
            return operation(*args)
        if self._next is not self.parts[-1]:
            self.parts.append(self._next)
        made = self._replaced(operation, args)
        if adds_in_place(operation, args, kwargs):
            made = args[0].add_(args[1])
        if made is None:
            made = operation(*args, **kwargs)
        part = self.parts[-1]
        for tensor in tensors_in(made):
            address = storage_address(tensor)
            if address not in self._live:
                storage = tensor.untyped_storage()
                if size := storage.nbytes():
                    part.moves.append(size)
                    end = functools.partial(
                        self._ended, address, Release(size, part.block, self._made)
                    )
                    self._made += 1
                    self._live[address] = weakref.ref(storage, end)
                    self._last = operation.overloadpacket.__name__
        if (scratch := scratch_of(operation, args, made)) is not None:
            part.moves.append(scratch)
        part.flops += flops_of(operation, args, kwargs, made)
        return made

    def _replaced(self, operation: Any, args: tuple[Any, ...]) -> Any:
        """What an operation gives that fake tensors cannot run, or in another type; None: none."""
        name = operation.overloadpacket.__name__
        if name == _GROUP_NORM:  # the kernel's gradient has the input's type, theirs the weight's
            given, weight, wanted = args[1], args[4], args[-1]
            sources = (given, weight, weight)
            return tuple(
                torch.empty_like(source) if takes else None
                for source, takes in zip(sources, wanted, strict=True)
            )
        if name == GROUPED and args[0].dtype != torch.bfloat16:  # of which only CPUs have a kernel
            return empty_product(*args[:3])
        if self._rows is None or name not in _DATA_DECIDES:
            return None
        shape = tuple(args[0].shape)
        if name == "_local_scalar_dense":
            return False if args[0].dtype == torch.bool else 0
        rows = self._rows(name, shape)
        return torch.empty(rows, len(shape), dtype=torch.int64, device=args[0].device)

    def _ended(self, address: int, release: Release, _: object) -> None:
        self._live.pop(address, None)
        self.parts[-1].moves.append(release)
        self._last = ""

    def works_in(self, scratch: Scratch) -> None:
        """What runs now takes this much for a moment."""
        self.parts[-1].moves.append(scratch)

    def arrived(self, parameter: Tensor) -> None:
        """A parameter has its gradient."""
        assert parameter.grad is not None
        size = parameter.grad.untyped_storage().nbytes()
        self.parts[-1].moves.append(Gradient(size, self._last in _COPIES))


def trace_pass(
    model: nn.Module,
    lists: Iterable[Mapping[str, nn.Module]],
    batch: Callable[[], Any],
    loss: Callable[[Any, Any], Tensor],
    *,
    device: torch.device | str = "cpu",
    backward: bool = True,
    rows: RowsGiven | None = None,
    around: Around | None = None,
) -> TracedPass:
    """Run `loss(model, batch())` and its backward pass on tensors without memory.

    Parameters and buffers are replaced by fake ones while this runs, whatever they are: on meta
    nothing is ever allocated.

    Args:
        lists: the model's lists of blocks, each block by its name and in the order in which they
            run: the borders of parts.
        batch: makes the batch; it is called where new tensors have no memory.
        loss: the sum of losses, one element.
        device: where the run is.
        backward: whether gradients are computed; if not, the pass is an evaluation's.
        rows: says how many rows an operation gives whose result the data decides, by its name and
            the shape of what it reads.
        around: gives the context of the forward pass.

    Raises:
        torch._subclasses.fake_tensor.DataDependentOutputException: data decides what runs, and
            `rows` is not given.
    """
    with fake_tensors(), ExitStack() as stack:
        trace = ByteTrace(rows)
        stack.enter_context(_without_memory(model, device))
        with trace.following(), torch.device(device):
            trace.known([*model.parameters(), *model.buffers()])
            made = batch()
            size = sum(change(move) for move in trace.parts[0].moves)
            trace.parts[0].moves.clear()
            with torch.set_grad_enabled(backward):
                for each in lists:
                    stack.enter_context(_bordered(trace, each))
                with nullcontext() if around is None else around(model, trace.works_in):
                    total = loss(model, made)
                if backward:
                    for parameter in model.parameters():
                        if parameter.requires_grad:
                            parameter.register_post_accumulate_grad_hook(trace.arrived)
                    trace.begin(OUTSIDE, "backward")
                    total.backward()
            parts = tuple(replace(part, moves=ordered(part.moves)) for part in trace.parts)
    return TracedPass(size, parts)


@contextmanager
def _without_memory(model: nn.Module, device: torch.device | str) -> Iterator[None]:
    """The model with fake parameters and buffers, on `device`; called within `fake_tensors`."""
    memo: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if (found := memo.get(id(tensor))) is not None:
            return found
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = made
        return made

    before: list[tuple[Any, dict[str, Any]]] = []
    try:
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                before.append((held, dict(held)))
                for name, tensor in held.items():
                    if tensor is not None:
                        held[name] = fake(tensor)  # type: ignore[assignment]
        yield
    finally:
        for held, tensors in before:
            held.update(tensors)


@contextmanager
def _bordered(trace: ByteTrace, blocks: Mapping[str, nn.Module]) -> Iterator[None]:
    """A part begins where a block does, forward and backward, and where the last one ends."""
    first, last = next(iter(blocks)), list(blocks)[-1]

    def hooks(name: str, block: nn.Module) -> list[Any]:
        def enters(module: nn.Module, args: Any, kwargs: Any) -> None:
            if trace.during == "backward":  # it runs again
                return
            trace.begin(name, "forward")
            if name == first:
                _when_differentiated((args, kwargs), lambda _: trace.begin(OUTSIDE, "backward"))

        def leaves(module: nn.Module, args: Any, output: Any) -> None:
            if trace.during == "backward":
                return
            _when_undone(output, lambda: trace.begin(name, "backward"))
            if name == last:
                trace.begin(OUTSIDE, "forward")

        return [
            block.register_forward_pre_hook(enters, with_kwargs=True, prepend=True),
            block.register_forward_hook(leaves),
        ]

    handles = [handle for name, block in blocks.items() for handle in hooks(name, block)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _when_undone(output: Any, then: Callable[[], None]) -> None:
    """Call `then` when a block's own backward pass begins.

    Of several streams the gradient of what the block made last is there first.
    """
    several = isinstance(output, tuple) and isinstance(output[0], tuple)
    begun = False

    def begins(_: Tensor) -> None:
        nonlocal begun
        if not begun:
            begun = True
            then()

    for stream in output[0] if several else [output]:
        _when_differentiated(stream, begins)


def _when_differentiated(values: Any, then: Callable[[Tensor], None]) -> None:
    """Call `then` when the gradient of the first of these tensors that takes one is there."""
    for tensor in tensors_in(values):
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(then)
            return
