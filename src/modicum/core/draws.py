"""Draws for whoever adds noise to all parameters at each step: cheap, and alike on every device.

A draw is a function of (seed, step, name, offset) alone, as in `core.random`. `core.random.normal_`
costs some seventy passes over a tensor and ends in a logarithm and a cosine, whose last bits differ
between libraries and devices. Here a number costs about ten passes, and has the same bits
everywhere, as nothing in it can round in two ways:

- random words are products, sums and shifts of 64-bit integers that wrap;
- a normal number is an entry of a table that 16 bits choose, a sign one bit; the table has
  multiples of 2^-20, fewer than 2^24 of them, which fp32 has exactly;
- what is added is rounded twice, once as scale times the number and once as the sum. Both are
  IEEE operations that eager PyTorch does one after the other, on every device; no kernel gets
  both, which could join them into a fused one that rounds once. So they are not compiled.

PyTorch's builds are for little-endian machines, and words are split in that order.

Source: the words are those of SplitMix64 with a step of each stream's own (Steele, Lea, Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014, section 4), which can start at any
place: word i is mix(start + i step).
"""

from __future__ import annotations

from functools import cache
from statistics import NormalDist
from typing import Literal, get_args

import torch
from torch import Tensor

from modicum.core.random import derive_seed, key

DrawKind = Literal["normal", "rademacher"]

#: Numbers that one word of 64 bits gives.
NUMBERS_IN_A_WORD = {"normal": 4, "rademacher": 64}

_HALF = 1 << 15  # entries of the table's positive half
_UNIT = 2.0**-20
_TO_UNIT_VARIANCE = 1.00001014110284  # the mean square of the quantiles below is 0.99997972
_CHUNK = 1 << 15  # numbers at a time: few enough for a core's cache, a multiple of every width
SCRATCH_BYTES = 24 * _CHUNK  # words, a copy that is shifted, places, numbers


def add_(
    tensor: Tensor,
    scale: float,
    *,
    seed: int,
    name: str,
    step: int = 0,
    offset: int = 0,
    kind: DrawKind = "normal",
) -> Tensor:
    """Add scale * z to a floating `tensor` in place; z has mean 0 and variance 1.

    "normal" z is N(0, 1) in 65,536 values of equal chance, none beyond 4.33; "rademacher" z is
    +1 or -1. Numbers are fp32, or fp64 where the tensor is. `offset` is where the tensor begins in
    the full one, in elements. Less than a megabyte of scratch memory is needed.

    >>> whole = add_(torch.zeros(10), 0.1, seed=0, name="w", step=3)
    >>> shard = add_(torch.zeros(4), 0.1, seed=0, name="w", step=3, offset=6)
    >>> torch.equal(whole[6:], shard)
    True

    Raises:
        ValueError: there is no such kind of draw.
    """
    width = _width(kind)
    with torch.no_grad():
        # Where the tensor is not contiguous its elements have no order of their own in memory.
        flat = tensor.contiguous().view(-1)
        dtype = torch.float64 if flat.dtype is torch.float64 else torch.float32
        start, end = offset, offset + flat.numel()
        while start < end:
            stop = min(end, start - start % width + _CHUNK)
            z = _numbers(kind, start, stop, seed, name, step, flat.device).to(dtype)
            piece = flat[start - offset : stop - offset]
            piece.add_(z.mul_(scale))
            start = stop
        return tensor if tensor.is_contiguous() else tensor.copy_(flat.view(tensor.shape))


def fill_(
    tensor: Tensor,
    *,
    seed: int,
    name: str,
    step: int = 0,
    offset: int = 0,
    kind: DrawKind = "normal",
) -> Tensor:
    """Fill `tensor` in place with the z that `add_` adds."""
    with torch.no_grad():
        return add_(tensor.zero_(), 1.0, seed=seed, name=name, step=step, offset=offset, kind=kind)


def words(
    first: int,
    last: int,
    *,
    seed: int,
    name: str,
    step: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Words of 64 bits, places `first` to before `last` of a stream: int64 [last - first]."""
    start, gamma = _stream(seed, name, step)
    z = torch.arange(first, last, dtype=torch.int64, device=device).mul_(gamma).add_(start)
    scratch = torch.empty_like(z)
    for shift, multiplier in ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB))):
        z.bitwise_xor_(_shifted(z, shift, scratch)).mul_(multiplier)
    return z.bitwise_xor_(_shifted(z, 31, scratch))


def _shifted(z: Tensor, shift: int, out: Tensor) -> Tensor:
    """Z shifted right with zeros coming in, as of an unsigned number."""
    torch.bitwise_right_shift(z, shift, out=out)
    return out.bitwise_and_((1 << (64 - shift)) - 1)


def _numbers(
    kind: DrawKind, start: int, stop: int, seed: int, name: str, step: int, device: torch.device
) -> Tensor:
    """The numbers from place `start` to before `stop`, fp32, in memory of their own."""
    width = _width(kind)
    first = start // width
    drawn = words(first, -(-stop // width), seed=seed, name=name, step=step, device=device)
    if kind == "normal":
        places = drawn.view(torch.int16).to(torch.int32).add_(_HALF)
        numbers = normals(device).index_select(0, places)
    else:
        octets = drawn.view(torch.uint8).to(torch.int32)
        numbers = _signs(device).index_select(0, octets).view(-1)
    return numbers[start - first * width : stop - first * width]


@cache
def normals(device: torch.device | str = "cpu") -> Tensor:
    """The 65,536 quantiles of N(0, 1) at odd multiples of 2^-17, scaled to a variance of 1, fp32.

    In multiples of 2^-20. None of them lies within 3e-11 of where its rounding would change, and
    libraries' logarithms are right to 1e-15, so that all machines make the same table.
    """
    quantile = NormalDist().inv_cdf
    upper = [quantile(0.5 + (2 * place + 1) / (4 * _HALF)) for place in range(_HALF)]
    units = torch.tensor([round(value * _TO_UNIT_VARIANCE / _UNIT) for value in upper])
    return (torch.cat([-units.flip(0), units]).float() * _UNIT).to(device)


@cache
def _signs(device: torch.device | str = "cpu") -> Tensor:
    """The eight signs of each octet, lowest bit first, fp32 [256, 8]."""
    octets = torch.arange(256).unsqueeze(1)
    return (((octets >> torch.arange(8)) & 1) * 2 - 1).float().to(device)


def _stream(seed: int, name: str, step: int) -> tuple[int, int]:
    """Where a stream starts, and the odd number by which it advances, as signed integers."""
    low, high = key(seed, f"{name}/advance", step)
    gamma = high << 32 | low | 1
    # A step of few changes between neighbouring bits mixes badly (the source, section 4.2).
    if (gamma ^ gamma >> 1).bit_count() < 24:
        gamma ^= 0xAAAAAAAAAAAAAAAA
    return derive_seed(seed, name, step), _signed(gamma)


def _signed(word: int) -> int:
    """The signed 64-bit integer of the same bits."""
    return word - (1 << 64) if word >> 63 else word


def _width(kind: str) -> int:
    """Numbers a word.

    Raises:
        ValueError: there is no such kind of draw.
    """
    if kind not in NUMBERS_IN_A_WORD:
        raise ValueError(f"no draw is called {kind!r}; there are {', '.join(get_args(DrawKind))}")
    return NUMBERS_IN_A_WORD[kind]
