"""What kernels take next to their inputs: outputs, copies and scratch, as the meter sees them.

Which kernel runs depends on processor, type, sizes and threads, and each lays its tensors out in
its own way: one copies channels in sixteens, another unfolds every patch. So it is tried, on a few
rows, once a machine.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from modicum.core.machine.memory import TensorMeter
from modicum.core.machine.record import remembered

# From so many rows on the same kernel runs, and bytes grow by as much with each row: PyTorch asks
# for 16 where there is one thread.
_ROWS = 16
_MOST_BYTES = 64 * 2**20  # of what one trial reads and makes


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
        return _tried(rows, inputs, outputs, side, half, through)
    each = (inputs + outputs) * side * side * (2 if half else 4)
    first = max(2, min(_ROWS, _MOST_BYTES // (2 * each)))
    one = _tried(first, inputs, outputs, side, half, through)
    two = _tried(2 * first, inputs, outputs, side, half, through)
    forward, backward = (
        a + (b - a) * (rows - first) // first for a, b in zip(one, two, strict=True)
    )
    return forward, backward


@functools.cache
def _tried(
    rows: int, inputs: int, outputs: int, side: int, half: bool, through: bool
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

    forward, backward = remembered(name, measure)
    return forward, backward
