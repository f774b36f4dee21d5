"""What kernels take next to their inputs: outputs, copies and scratch, as the meter sees them.

Which kernel runs depends on processor, type, sizes and threads, and each lays its tensors out in
its own way: one copies channels in sixteens, another unfolds every patch. So it is tried, on a few
rows, once a machine.
"""

from __future__ import annotations

import functools
import math
import os
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from modicum.core.machine.memory import TensorMeter
from modicum.core.machine.record import remembered

# From so many rows on the same kernel runs, and bytes grow by as much with each row: PyTorch asks
# for 16 where there is one thread.
_ROWS = 16
_MOST_BYTES = 64 * 2**20  # of what one trial reads and makes
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_MOST_PRODUCTS = 2**33  # multiplications of one trial: some tenths of a second


def convolution_bytes(
    rows: int, inputs: int, outputs: int, side: int, *, half: bool, through: bool
) -> tuple[int, int]:
    """Bytes at the peak of a 3x3 convolution forward and backward, beyond what goes into each.

    Args:
        rows: images in the batch.
        inputs, outputs: channels.
        side: height and width of the images, in and out.
        half: whether it is in bf16, else in fp32.
        through: whether the images take a gradient.

    Returns:
        forward: output and scratch.
        backward: gradients of weight, bias and, if `through`, images, and scratch.

    >>> convolution_bytes(2, 8, 8, 4, half=False, through=True)[0] >= 2 * 8 * 4 * 4 * 4
    True
    """
    if rows <= _ROWS:
        return _convolution(rows, inputs, outputs, side, half, through)
    each = (inputs + outputs) * side * side * (2 if half else 4)
    first = max(2, min(_ROWS, _MOST_BYTES // (2 * each)))
    one = _convolution(first, inputs, outputs, side, half, through)
    two = _convolution(2 * first, inputs, outputs, side, half, through)
    forward, backward = (
        a + (b - a) * (rows - first) // first for a, b in zip(one, two, strict=True)
    )
    return forward, backward


class Convolution(NamedTuple):
    """A convolution of any kind over one to three dimensions; sides are the input's."""

    inputs: int
    outputs: int
    sides: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    half: bool

    def scratch(self, rows: int, wanted: tuple[bool, ...] = ()) -> int:
        """Bytes that it works in beyond what goes in and what comes out, with so many rows.

        Args:
            rows: of the input.
            wanted: which gradients are computed, of input, weight and bias; none: it runs forward.

        >>> sides, one, none = (8, 8), (1, 1), (0, 0)
        >>> patches = Convolution(3, 4, sides, (4, 4), (4, 4), none, one, 1, False)
        >>> patches.scratch(2) >= 0
        True
        """
        if rows <= _ROWS:
            return self._tried(rows, wanted)
        each = self.inputs * math.prod(self.sides) * (2 if self.half else 4)
        first = max(2, min(_ROWS, _MOST_BYTES // (4 * each)))
        one, two = self._tried(first, wanted), self._tried(2 * first, wanted)
        return one + (two - one) * (rows - first) // first

    def _tried(self, rows: int, wanted: tuple[bool, ...]) -> int:
        return _scratch_of(self, rows, wanted, torch.get_num_threads())


class ProductScratch(NamedTuple):
    """Bytes that a layer's three matrix products take beyond operands and result.

    Attributes:
        forward: of x W^T.
        inputs: of the gradient of x.
        weight: of the gradient of W.
    """

    forward: int
    inputs: int
    weight: int


def library_bytes(device: str) -> int:
    """Bytes of tensors that cuBLAS keeps for its products, once for each of a step's two threads.

    PyTorch gives it 32 MiB on cards of compute capability 9 and more, 8 MiB and some on others, or
    what `CUBLAS_WORKSPACE_CONFIG` says (`:KiB:count`, several times). Where the card is not here,
    the larger of the two.

    >>> library_bytes("cpu")
    0
    """
    if device != "cuda":
        return 0
    sizes = [int(size) for size in os.environ.get(_WORKSPACE, "").split(":") if size.isdecimal()]
    if sizes and len(sizes) % 2 == 0:
        each = sum(1024 * size * count for size, count in zip(sizes[::2], sizes[1::2], strict=True))
    else:
        here = torch.cuda.is_available()
        large = not here or torch.cuda.get_device_capability()[0] >= 9
        each = 32 * 2**20 if large else 2 * 4096 * 2**10 + 8 * 16 * 2**10
    return 2 * each  # that of the forward pass, and autograd's


def product_scratch(rows: int, inputs: int, outputs: int, *, half: bool) -> ProductScratch:
    """What a linear layer's products work in, with this process's number of threads.

    In bf16 each thread packs its operands and sums in fp32, and where the rows are shared among
    threads each has a full weight gradient of its own. In fp32 what the library takes is not
    PyTorch's: the machine's record has it.

    Products of over 2^33 multiplications are tried at half of their largest sizes; the scratch of
    the weight's gradient is then taken to grow with the weight.

    Args:
        rows: of the input.
        inputs, outputs: features of the layer.
        half: whether it computes in bf16, else in fp32.

    >>> product_scratch(4, 8, 8, half=False)
    ProductScratch(forward=0, inputs=0, weight=0)
    """
    # Where a small product takes nothing, no product does, and large ones may take minutes.
    if not half or not all((rows, inputs, outputs)) or not any(_product(64, 64, 64)):
        return ProductScratch(0, 0, 0)
    sizes = [rows, inputs, outputs]
    while sizes[0] * sizes[1] * sizes[2] > _MOST_PRODUCTS:
        largest = sizes.index(max(sizes))
        sizes[largest] = -(-sizes[largest] // 2)
    found = _product(*sizes)
    grown = found.weight * inputs * outputs // (sizes[1] * sizes[2])
    return ProductScratch(found.forward, found.inputs, grown)


def _product(rows: int, inputs: int, outputs: int) -> ProductScratch:
    return _multiplied(rows, inputs, outputs, torch.get_num_threads())


@functools.cache
def _multiplied(rows: int, inputs: int, outputs: int, threads: int) -> ProductScratch:
    def measure() -> list[int]:
        x, weight, gradient = (
            torch.ones(shape, dtype=torch.bfloat16)
            for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
        )
        found = []
        for left, right in ((x, weight.t()), (gradient, weight), (gradient.t(), x)):
            with TensorMeter("cpu") as meter:
                made = left @ right
            found.append(max(0, (meter.peak or 0) - made.nbytes))
        return found

    return ProductScratch(*remembered(f"product {rows} {inputs} {outputs}", measure, 3))


@functools.cache
def _scratch_of(call: Convolution, rows: int, wanted: tuple[bool, ...], threads: int) -> int:
    def measure() -> list[int]:
        dtype = torch.bfloat16 if call.half else torch.float32
        weights = (call.outputs, call.inputs // call.groups, *call.kernel)
        sizes = ((rows, call.inputs, *call.sides), weights, (call.outputs,))
        given = [torch.ones(size, dtype=dtype) for size in sizes]
        run: Any = (F.conv1d, F.conv2d, F.conv3d)[len(call.sides) - 1]
        how = (call.stride, call.padding, call.dilation, call.groups)
        for tensor, takes in zip(given, wanted, strict=False):
            tensor.requires_grad_(takes)
        with torch.set_grad_enabled(any(wanted)):
            with TensorMeter("cpu") as meter:
                results = [run(*given, *how)]
            if any(wanted):
                gradient = torch.ones_like(results[0])
                takers = [tensor for tensor in given if tensor.requires_grad]
                with TensorMeter("cpu") as meter:
                    results = list(torch.autograd.grad(results[0], takers, gradient))
        return [max(0, (meter.peak or 0) - sum(tensor.nbytes for tensor in results))]

    return remembered(f"scratch {rows} {tuple(call)} {wanted}", measure)[0]


def _convolution(*arguments: int) -> tuple[int, int]:
    return _convolved(*arguments, threads=torch.get_num_threads())


@functools.cache
def _convolved(
    rows: int, inputs: int, outputs: int, side: int, half: bool, through: bool, threads: int
) -> tuple[int, int]:
    name = f"convolution {rows} {inputs} {outputs} {side} {half:d} {through:d}"

    def measure() -> list[int]:
        dtype = torch.bfloat16 if half else torch.float32
        images = torch.ones(rows, inputs, side, side, dtype=dtype, requires_grad=through)
        weight = torch.ones(outputs, inputs, 3, 3, dtype=dtype, requires_grad=True)
        bias = torch.ones(outputs, dtype=dtype, requires_grad=True)
        with torch.enable_grad():
            with TensorMeter("cpu") as forward:
                made = F.conv2d(images, weight, bias, padding=1)
            gradient = torch.ones_like(made)
            wanted = [weight, bias, *([images] if through else [])]
            with TensorMeter("cpu") as backward:
                torch.autograd.grad(made, wanted, gradient)
        return [forward.peak or 0, backward.peak or 0]

    forward, backward = remembered(name, measure, 2)
    return forward, backward
