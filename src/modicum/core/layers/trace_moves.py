"""Moves of a trace: bytes that come and go in the parts of a pass, and what kernels work in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from modicum.core.machine.kernels import Convolution, product_scratch

OUTSIDE = ""
"""The name of a part that is in no block."""
_PRODUCTS = ("mm", "addmm")
_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
Pass = Literal["forward", "backward"]


class ScratchProduct(NamedTuple):
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


class AveragedInFloat(NamedTuple):
    """Means of bf16 on the CPU: what is read and what is made are there in fp32 too."""

    def scratch(self, rows: int) -> int:
        """Bytes, with so many elements."""
        return 4 * rows


class InPieces(NamedTuple):
    """Elements that are worked on a piece at a time, each with so many bytes more."""

    element_bytes: int
    piece: int

    def scratch(self, rows: int) -> int:
        """Bytes, with so many elements."""
        return self.element_bytes * min(rows, self.piece)


Kernel = ScratchProduct | Convolved | AveragedInFloat | InPieces


class Scratch(NamedTuple):
    """What a kernel works in while it runs.

    Attributes:
        rows: of what it reads; of means, and of what is done in pieces, the elements.
    """

    kernel: Kernel
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


@dataclass(frozen=True)
class TracedPass:
    """One batch's way through a model: the bytes of the batch itself, and the parts in order."""

    batch_bytes: int
    parts: tuple[TracedPart, ...]


def scratch_of(operation: Any, args: tuple[Any, ...], made: Any) -> Scratch | None:
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
    elif name == "mean" and args[0].dtype == torch.bfloat16 and args[0].device.type == "cpu":
        return Scratch(AveragedInFloat(), args[0].numel() + made.numel())
    return None


def _product(left: Tensor, right: Tensor) -> Scratch:
    rows, inner = left.shape
    columns: int = right.shape[1]
    if left.stride(0) == 1 and inner > 1 and not left.is_contiguous():
        return Scratch(ScratchProduct("weight", columns, rows), inner)  # gradient^T x
    if right.stride(0) == 1 and not right.is_contiguous():
        return Scratch(ScratchProduct("forward", inner, columns), rows)  # x W^T
    return Scratch(ScratchProduct("inputs", columns, inner), rows)  # gradient W


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


def flops_of(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> int:
    """Floating-point operations of a matrix product or an attention; of anything else none."""
    packet = operation.overloadpacket
    if packet.__name__ == _ATTENTION:
        return int(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))
    if packet.__name__ == f"{_ATTENTION}_backward":  # four products where forward has two
        return 2 * int(sdpa_flop_count(*(tensor.shape for tensor in args[1:4])))
    if packet.__name__ == "addmm_":  # the counter knows the form that is not in place
        return 2 * args[1].numel() * args[2].shape[1]
    if packet.__name__ == "_grouped_mm":
        return 2 * int(args[0].numel()) * int(args[1].shape[-1])
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=made)) if formula else 0


def ordered(moves: list[Move]) -> list[Move]:
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


def change(move: Move) -> int:
    """By how many bytes a move changes what is there."""
    if isinstance(move, int):
        return move
    return -move.bytes if isinstance(move, Release) else 0


_OF_NUMBERS: dict[str, Any] = {
    each.__name__: each for each in (ScratchProduct, AveragedInFloat, InPieces)
}


def plain(move: Move) -> Any:
    """A move as JSON has it: a number, or a list with a word for its kind first.

    >>> move_of(plain(Release(4, "layers.0", 2)))
    Release(bytes=4, block='layers.0', number=2)
    """
    if isinstance(move, int):
        return move
    if isinstance(move, Scratch):
        return [type(move.kernel).__name__, [*move.kernel], move.rows]
    return [type(move).__name__, *move]


def move_of(raw: Any) -> Move:
    """The move of such values.

    Raises:
        ValueError, KeyError, TypeError: they are none.
    """
    if isinstance(raw, int):
        return raw
    kind, *rest = raw
    if kind == "Release":
        return Release(*rest)
    if kind == "Gradient":
        return Gradient(*rest)
    (fields, rows) = rest
    if kind in _OF_NUMBERS:
        return Scratch(_OF_NUMBERS[kind](*fields), rows)
    call, wanted = fields
    call = [tuple(field) if isinstance(field, list) else field for field in call]
    return Scratch(Convolved(Convolution(*call), tuple(wanted)), rows)


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
