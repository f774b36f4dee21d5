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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from modicum.core.machine.kernels import Convolution, product_scratch
from modicum.core.torch_private import fake_tensors, running_operations, storage_address

OUTSIDE = ""
"""The name of a part that is in no block."""
_PRODUCTS = ("mm", "addmm")
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_DATA_DECIDES = ("nonzero", "_local_scalar_dense")
_COPIES = ("new_empty_strided", "clone")
_DEVICE = torch.ops.prim.device.default
Pass = Literal["forward", "backward"]


class Product(NamedTuple):
    """One of a linear layer's three products in bf16: of so many features in and out."""

    made: Literal["forward", "inputs", "weight"]
    inputs: int
    outputs: int

    def scratch(self, rows: int) -> int:
        """Bytes on this machine, with this process's threads."""
        found = product_scratch(rows, self.inputs, self.outputs, half=True)
        return int(getattr(found, self.made))


class Convolved(NamedTuple):
    """A convolution, or the gradients that are wanted of input, weight and bias."""

    call: Convolution
    wanted: tuple[bool, ...] = ()

    def scratch(self, rows: int) -> int:
        """Bytes on this machine, with this process's threads."""
        return self.call.scratch(rows, self.wanted)


class Scratch(NamedTuple):
    """What a kernel works in while it runs."""

    kernel: Product | Convolved
    rows: int

    @property
    def bytes(self) -> int:
        """On this machine."""
        return self.kernel.scratch(self.rows)


class Gradient(NamedTuple):
    """A parameter's gradient is there; added to one that is there already, it ends here.

    Attributes:
        bytes: of the gradient.
        copied: whether the last move was its copy, which is not made where gradients add up.
    """

    bytes: int
    copied: bool


class Release(NamedTuple):
    """A storage ends.

    Attributes:
        bytes: of it.
        block: in whose part it was made, or `OUTSIDE`.
        number: how many storages were made before it.
    """

    bytes: int
    block: str
    number: int = 0


Move = int | Release | Scratch | Gradient
"""Bytes of a storage that comes; one that goes; or something about a moment."""


@dataclass
class TracedPart:
    """What happens from one border of blocks to the next.

    Attributes:
        block: the name of the block that ran; `OUTSIDE` for what no block holds.
        during: the pass, forward or backward.
        moves: in order.
        flops: of matrix products, an attention's counted as PyTorch's counter does in its
            plain form.
    """

    block: str
    during: Pass
    moves: list[Move] = field(default_factory=list)
    flops: int = 0


class ByteTrace:
    """Follows every storage from the operation that makes it to its end, in parts.

    >>> trace = ByteTrace()
    >>> with fake_tensors(), trace.following():
    ...     kept = torch.empty(1000)
    ...     del kept
    >>> [part.moves for part in trace.parts]
    [[4000, Release(bytes=4000, block='', number=0)]]
    """

    def __init__(self, rows: Callable[[str, tuple[int, ...]], int] | None = None) -> None:
        self._next = TracedPart(OUTSIDE, "forward")
        self.parts = [self._next]
        self._live: dict[int, weakref.ref[Any]] = {}
        self._rows = rows
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
        made = self._guessed(operation, args) if self._rows else None
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
        if (scratch := _scratch(operation, args)) is not None:
            part.moves.append(scratch)
        part.flops += _flops(operation, args, kwargs, made)
        return made

    def _guessed(self, operation: Any, args: tuple[Any, ...]) -> Any:
        """What an operation gives whose result the data decides; None: no data decides."""
        name = operation.overloadpacket.__name__
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

    def arrived(self, parameter: Tensor) -> None:
        """A parameter has its gradient."""
        assert parameter.grad is not None
        size = parameter.grad.untyped_storage().nbytes()
        self.parts[-1].moves.append(Gradient(size, self._last in _COPIES))


def _scratch(operation: Any, args: tuple[Any, ...]) -> Scratch | None:
    """What the kernel of an operation on the CPU works in, where that is known to be much."""
    name = operation.overloadpacket.__name__
    if name in _PRODUCTS:
        left, right = args[-2:] if name == "mm" else args[1:3]
        if left.dtype == torch.bfloat16 and left.device.type == "cpu":
            return _product(left, right)
    elif name == "convolution" and args[0].device.type == "cpu" and not args[6]:
        return _convolved(args[0], args[1], args[3:])
    elif name == "convolution_backward" and args[1].device.type == "cpu" and not args[7]:
        return _convolved(args[1], args[2], args[4:], wanted=tuple(args[10]))
    return None


def _product(left: Tensor, right: Tensor) -> Scratch:
    rows, inner = left.shape
    columns: int = right.shape[1]
    if left.stride(0) == 1 and inner > 1 and not left.is_contiguous():
        return Scratch(Product("weight", columns, rows), inner)  # gradient^T x
    if right.stride(0) == 1 and not right.is_contiguous():
        return Scratch(Product("forward", inner, columns), rows)  # x W^T
    return Scratch(Product("inputs", columns, inner), rows)  # gradient W


def _convolved(
    images: Tensor, weight: Tensor, how: tuple[Any, ...], wanted: tuple[bool, ...] = ()
) -> Scratch | None:
    sides, kernel = tuple(images.shape[2:]), tuple(weight.shape[2:])
    stride, padding, dilation = ((*each,) for each in how[:3])
    half = images.dtype == torch.bfloat16
    if not 1 <= len(sides) <= 3 or not (half or images.dtype == torch.float32):
        return None
    call = Convolution(
        images.shape[1], weight.shape[0], sides, kernel, stride, padding, dilation, how[5], half
    )
    return Scratch(Convolved(call, wanted), images.shape[0])


def _flops(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> int:
    packet = operation.overloadpacket
    if packet.__name__ == _ATTENTION:
        return int(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))
    if packet.__name__ == f"{_ATTENTION}_backward":  # four products where forward has two
        return 2 * int(sdpa_flop_count(*(tensor.shape for tensor in args[1:4])))
    if packet.__name__ == "addmm_":  # the counter knows the form that is not in place
        return 2 * args[1].numel() * args[2].shape[1]
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=made)) if formula else 0


@dataclass(frozen=True)
class TracedPass:
    """One batch's way through a model: the bytes of the batch itself, and the parts in order."""

    batch_bytes: int
    parts: tuple[TracedPart, ...]


def trace_pass(
    model: nn.Module,
    lists: Iterable[Mapping[str, nn.Module]],
    batch: Callable[[], Any],
    loss: Callable[[Any, Any], Tensor],
    *,
    device: torch.device | str = "cpu",
    backward: bool = True,
    rows: Callable[[str, tuple[int, ...]], int] | None = None,
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
            size = sum(_change(move) for move in trace.parts[0].moves)
            trace.parts[0].moves.clear()
            with torch.set_grad_enabled(backward):
                for each in lists:
                    stack.enter_context(_bordered(trace, each))
                total = loss(model, made)
                if backward:
                    for parameter in model.parameters():
                        if parameter.requires_grad:
                            parameter.register_post_accumulate_grad_hook(trace.arrived)
                    trace.begin(OUTSIDE, "backward")
                    total.backward()
            parts = tuple(replace(part, moves=_ordered(part.moves)) for part in trace.parts)
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
            _when_differentiated(output, lambda _: trace.begin(name, "backward"))
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


def _when_differentiated(values: Any, then: Callable[[Tensor], None]) -> None:
    """Call `then` when the gradient of the first of these tensors that takes one is there."""
    for tensor in tensors_in(values):
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(then)
            return


def _ordered(moves: list[Move]) -> list[Move]:
    """The moves, with storages that end at once in the order in which they were made.

    Autocast lets go of its copies in the order of their addresses.
    """
    found: list[Move] = []
    ends: list[Release] = []
    for move in moves:
        if isinstance(move, Release):
            ends.append(move)
            continue
        found += [*sorted(ends, key=_number), move]
        ends = []
    return found + sorted(ends, key=_number)


def _number(end: Release) -> int:
    return end.number


def _change(move: Move) -> int:
    if isinstance(move, int):
        return move
    return -move.bytes if isinstance(move, Release) else 0


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors of nested lists, tuples and dicts, in order.

    >>> [len(tensor) for tensor in tensors_in({"a": [torch.ones(2), 3], "b": (torch.ones(4),)})]
    [2, 4]
    """
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from tensors_in(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)
