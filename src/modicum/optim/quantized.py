"""Moments of an optimizer in 8 bits, blocks of 256 with a scale each on a dynamic map.

The codes and scales are plain tensors in `optimizer.state`, `NAME` and `NAME_scale`, so they are
saved and loaded like any other (see `modicum.optim.kept`). A moment of fewer than 4096 elements
stays fp32: it takes little, and is often that of a layer which needs its precision.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861, sections
2 and 3; the map is that of bitsandbytes, as are the block of 256 and the smallest size.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

BLOCK, SMALLEST = 256, 4096
# Elements that are looked up at a time, which bounds the scratch memory.
CHUNK = 4096 * BLOCK
_EXPONENTS = 7


@functools.cache
def dynamic_map(signed: bool) -> Tensor:
    """The 256 values in [-1, 1], or [0, 1], that a code represents, in order: fp32 [256].

    A value has one of seven powers of ten, and the larger the power the finer its fraction.

    >>> values = dynamic_map(signed=False)
    >>> len(values), f"{values[1]:.3g}", f"{values[-2]:.3g}", values[-1].item()
    (256, '3.25e-07', '0.996', 1.0)
    """
    values = [0.0, 1.0]
    for place in range(_EXPONENTS):
        fractions = 2 ** (place + (0 if signed else 1))
        edges = torch.linspace(0.1, 1.0, fractions + 1, dtype=torch.float64, device="cpu")
        found = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (place - _EXPONENTS + 1)).tolist()
        values += found + ([-value for value in found] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32, device="cpu")


@functools.cache
def lookup(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """The map on a device, and the 255 borders between its values."""
    values = dynamic_map(signed).to(device)
    return values, (values[:-1] + values[1:]) / 2


@functools.cache
def _first_codes(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """By the upper 16 bits of an fp32 number the least code of such numbers, uint8 [65536].

    And by a code the border to the next one; numbers alike in these bits have one in between at
    most.
    """
    _, borders = lookup(signed, torch.device("cpu"))
    upper = torch.arange(1 << 16, dtype=torch.int32, device="cpu")
    # Of negative numbers the least has all lower bits set.
    least = upper << 16
    least[1 << 15 :] |= 0xFFFF
    first = torch.bucketize(least.view(torch.float32), borders, out_int32=True).to(torch.uint8)
    ends = torch.cat([borders, torch.tensor([torch.inf], device="cpu")])
    return first.to(device), ends.to(device)


def nearest(values: Tensor, *, signed: bool) -> Tensor:
    """The codes of fp32 values between -1 and 1, or 0 and 1: uint8, of their shape.

    The same as a search among the borders, which on a CPU takes ten times as long.

    >>> nearest(torch.tensor([0.0, 1e-7, 1.0]), signed=False).tolist()
    [0, 0, 255]
    """
    first, ends = _first_codes(signed, values.device)
    flat = values.reshape(-1)
    codes = first.index_select(0, (flat.view(torch.int32) >> 16).bitwise_and_(0xFFFF))
    codes += flat > ends.index_select(0, codes.int())
    return codes.view(values.shape)


def scales(elements: int) -> int:
    """How many scales so many codes have."""
    return -(-elements // BLOCK)


def quantize_(codes: Tensor, scale: Tensor, values: Tensor, *, signed: bool) -> None:
    """Put `values` (fp32, of the shape of `codes`) into uint8 `codes` and fp32 `scale` [blocks].

    Without a sign nothing has the code of zero, as in `coded_rows.encode`: a mean of squares that
    is read as zero would make a step without bound. A block of zeros is zero by its scale.
    """
    flat, out = values.reshape(-1), codes.view(-1)
    for start in range(0, flat.numel(), CHUNK):
        part = flat[start : start + CHUNK]
        whole = torch.nn.functional.pad(part, (0, -part.numel() % BLOCK)).view(-1, BLOCK)
        largest = whole.abs().amax(dim=1)
        scale[start // BLOCK : start // BLOCK + len(largest)] = largest
        # A block of zeros has the scale zero, and any positive one in its place is as good.
        scaled = whole / largest.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
        out[start : start + CHUNK] = nearest(scaled.view(-1)[: part.numel()], signed=signed)
        if not signed:
            out[start : start + CHUNK].clamp_(min=1)


def dequantize(codes: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    """The values that codes and scales represent: fp32, of the shape of `codes`."""
    values, _ = lookup(signed, codes.device)
    result = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    flat, out = codes.view(-1), result.view(-1)
    for start in range(0, flat.numel(), CHUNK):
        part = flat[start : start + CHUNK]
        found = torch.nn.functional.pad(values[part.int()], (0, -part.numel() % BLOCK))
        found = found.view(-1, BLOCK)
        found *= scale[start // BLOCK : start // BLOCK + len(found), None]
        out[start : start + CHUNK] = found.view(-1)[: part.numel()]
    return result
