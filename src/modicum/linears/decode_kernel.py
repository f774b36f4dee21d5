"""Levels times scales as one kernel on a GPU, in Triton, to the bit what PyTorch's several make.

PyTorch's read codes as indices and write numbers in fp32 before they are rounded: some twenty bytes
for each weight, where this one reads half a byte or one and writes the weight. Triton comes with
PyTorch's builds for CUDA; where it is not there, nothing here can be called.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # as in builds for CPUs
    triton = None

_BLOCK = 1024  # weights that a program makes


def decode_into(weight: Tensor, codes: Tensor, scales: Tensor, levels: Tensor, group: int) -> None:
    """Write into `weight` the levels of its codes times their groups' scales.

    Args:
        weight: [rows, columns] of any floating-point dtype, which products in fp32 are rounded to.
        codes: uint8 [rows, ceil(columns / k)], k codes a byte, the first in the highest bits.
        scales: float32 [rows, ceil(columns / group)].
        levels: float32, 16 of them where a byte holds two codes, else 256.
        group: consecutive weights of a row that share a scale.
    """
    rows, columns = weight.shape
    if not weight.numel():
        return
    with torch.cuda.device_of(weight):
        _kernel()[rows, triton.cdiv(columns, _BLOCK)](
            weight, codes.contiguous(), scales.contiguous(), levels, columns, codes.shape[1],
            scales.shape[1], GROUP=group, PACKED=2 if len(levels) == 16 else 1, BLOCK=_BLOCK,
        )  # fmt: skip


@cache
def _kernel() -> Any:
    """What Triton compiles when it is first called."""
    return triton.jit(_decode)


# Triton reads the annotations too, and knows no others.
def _decode(  # type: ignore[no-untyped-def]
    weight,
    codes,
    scales,
    levels,
    columns,
    row_bytes,
    row_groups,
    GROUP: tl.constexpr,  # noqa: N803
    PACKED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    code = tl.load(codes + row * row_bytes + at // PACKED, mask=inside, other=0).to(tl.int32)
    if PACKED == 2:
        code = tl.where(at % 2 == 0, code >> 4, code & 15)
    scale = tl.load(scales + row * row_groups + at // GROUP, mask=inside, other=0.0)
    value = tl.load(levels + code, mask=inside, other=0.0) * scale
    tl.store(weight + row * columns + at, value.to(weight.dtype.element_ty), mask=inside)
