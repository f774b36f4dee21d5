"""What numbers look like on a wire: codecs for flat buffers, exact in their bytes.

A codec turns rows of numbers into rows of bytes, each of which can be decoded alone, and back. It
keeps nothing: where it rounds at random, the draws are a function of a `Stream`, so that a run
which is resumed sends the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from modicum.core.random import key, mixed

HADAMARD = 32  # the points of a block of the transform
_DRAWS = 4  # of 16 bits each, in a word
_CHUNK = 1 << 15  # words at a time: bounds the scratch memory, and stays in the processor's caches
_BLOCKS = 1 << 13  # of the transform at a time, for the same reasons


@dataclass(frozen=True)
class Stream:
    """Names the random draws of one encoding; element number i of the rows has draw number i."""

    seed: int = 0
    step: int = 0
    name: str = ""


class ElementCodec(Protocol):
    """Rows of numbers to rows of bytes and back, element by element or group by group."""

    def nbytes(self, elements: int) -> int:
        """Bytes of a row of so many elements, everything included."""

    def encode(self, rows: Tensor, stream: Stream) -> Tensor:
        """Rows [k, n], fp32, as messages [k, nbytes(n)], uint8."""

    def decode(self, messages: Tensor, elements: int) -> Tensor:
        """Messages [k, nbytes(n)] as rows [k, n] of n = `elements`, fp32."""


@dataclass(frozen=True)
class Cast:
    """The numbers themselves: fp32 as they are (32 bits), or rounded to bfloat16 (16 bits).

    >>> codec = Cast(16)
    >>> codec.nbytes(3), codec.decode(codec.encode(torch.tensor([[1.0, 0.1]]), Stream()), 2)
    (6, tensor([[1.0000, 0.1001]]))
    """

    bits: int = 32

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float32 if self.bits == 32 else torch.bfloat16

    def nbytes(self, elements: int) -> int:
        return elements * self.bits // 8

    def encode(self, rows: Tensor, stream: Stream) -> Tensor:
        return rows.to(self._dtype).contiguous().view(torch.uint8)

    def decode(self, messages: Tensor, elements: int) -> Tensor:
        return messages.contiguous().view(self._dtype).float()


@dataclass(frozen=True)
class GroupQuantizer:
    """Symmetric integers of 4 or 8 bits, with one fp32 scale a group and stochastic rounding.

    A group's scale is s = max|x| / L with L = 7 levels to each side for 4 bits and 127 for 8, and 1
    where all of it is zero; x becomes floor(x / s + u), u uniform in [0, 1). So what is decoded is
    x on average, and off by less than s. A number that is not finite makes its group NaN: who
    checks the result finds it.

    Args:
        bits: 4 (two to a byte) or 8.
        group: elements that share a scale; even. A row's last group is filled up with zeros, which
            are sent.

    Source: Jia et al., "SDP4Bit", arXiv 2410.15526, section 3, and the authors' code: the sixteenth
    level of 4 bits is left out, as using it hurt late convergence.

    >>> codec = GroupQuantizer(bits=4, group=128)
    >>> codec.nbytes(1000)  # eight groups of 64 bytes and a scale
    544
    >>> rows = torch.linspace(-1, 1, 200)[None]
    >>> error = codec.decode(codec.encode(rows, Stream()), 200) - rows
    >>> bool(error.abs().max() < 1 / 7)
    True
    """

    bits: int = 4
    group: int = 128

    @property
    def levels(self) -> int:
        """L, the largest code."""
        return (1 << (self.bits - 1)) - 1

    def _groups(self, elements: int) -> int:
        return -(-elements // self.group)

    def nbytes(self, elements: int) -> int:
        return self._groups(elements) * (4 + self.group * self.bits // 8)

    def encode(self, rows: Tensor, stream: Stream) -> Tensor:
        groups = padded(rows.float(), self.group).view(len(rows), -1, self.group)
        scales = groups.abs().amax(-1, keepdim=True) / self.levels
        scales.masked_fill_(scales == 0, 1.0)
        codes = groups / scales
        add_uniforms(codes, stream)
        codes = codes.floor_().clamp_(-self.levels, self.levels).to(torch.int8).flatten(1)
        payload = pack(codes) if self.bits == 4 else codes.view(torch.uint8)
        return torch.cat([scales.flatten(1).view(torch.uint8), payload], 1)

    def decode(self, messages: Tensor, elements: int) -> Tensor:
        border = 4 * self._groups(elements)
        scales = messages[:, :border].clone(memory_format=torch.contiguous_format)
        payload = messages[:, border:]
        codes = unpack(payload) if self.bits == 4 else payload.contiguous().view(torch.int8)
        groups = codes.view(len(codes), -1, self.group) * scales.view(torch.float32)[..., None]
        return groups.flatten(1)[:, :elements]


def codec(bits: int, group: int) -> ElementCodec:
    """The codec of so many bits an element: 4 and 8 in groups, 16 is bfloat16, 32 is exact."""
    return GroupQuantizer(bits, group) if bits <= 8 else Cast(bits)


def padded(rows: Tensor, multiple: int) -> Tensor:
    """Rows [..., n] with zeros behind them, up to the next multiple; contiguous.

    >>> padded(torch.ones(2, 3), 2).tolist()
    [[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0]]
    """
    missing = -rows.shape[-1] % multiple
    return F.pad(rows, (0, missing)) if missing else rows.contiguous()


def pack(codes: Tensor) -> Tensor:
    """Codes in [-8, 7], int8 [k, n] with even n, two to a byte: uint8 [k, n/2], the first below.

    >>> codes = torch.tensor([[-7, 7, 0, 1]], dtype=torch.int8)
    >>> pack(codes).tolist(), unpack(pack(codes)).tolist()
    ([[241, 152]], [[-7, 7, 0, 1]])
    """
    nibbles = (codes + 8).view(torch.uint8)
    return nibbles[:, ::2] | (nibbles[:, 1::2] << 4)


def unpack(payload: Tensor) -> Tensor:
    """The codes of bytes that `pack` made: uint8 [k, n/2] to int8 [k, n]."""
    nibbles = torch.stack((payload & 15, payload >> 4), -1).flatten(1)
    return nibbles.view(torch.int8) - 8


def hadamard(rows: Tensor) -> Tensor:
    """H x of every 32 elements of rows [k, n], n a multiple of 32; H H = 32 I.

    H is the Walsh-Hadamard matrix of plus and minus ones in Sylvester's order. A lone outlier is
    spread over its block, so that a scale shared by the group fits the other numbers too.

    >>> rows = torch.eye(1, 32)
    >>> hadamard(rows).unique().tolist(), torch.equal(hadamard(hadamard(rows)) / 32, rows)
    ([1.0], True)
    """
    blocks = rows.reshape(-1, HADAMARD)
    result = torch.empty_like(blocks, memory_format=torch.contiguous_format)
    scratch = blocks.new_empty(HADAMARD * min(_BLOCKS, len(blocks)))
    for start in range(0, len(blocks), _BLOCKS):
        piece = blocks[start : start + _BLOCKS]
        place = result[start : start + _BLOCKS]
        # Elements of one number in their blocks stand together, so that a stage adds long runs. The
        # result's own place is one of two buffers; the fifth stage ends in the other.
        here, there = (
            buffer[: piece.numel()].view(HADAMARD, -1) for buffer in (place.view(-1), scratch)
        )
        here.copy_(piece.t())
        for stage in range(HADAMARD.bit_length() - 1):
            one, other = here.view(-1, 2, 1 << stage, len(piece)).unbind(1)
            added, taken = there.view(-1, 2, 1 << stage, len(piece)).unbind(1)
            torch.add(one, other, out=added)
            torch.sub(one, other, out=taken)
            here, there = there, here
        place.copy_(here.t())
    return result.view(rows.shape)


def add_uniforms(values: Tensor, stream: Stream) -> None:
    """Add draws of U(0, 1) to contiguous fp32 `values` in place: 16 bits each, on any device alike.

    >>> values = torch.zeros(20)
    >>> add_uniforms(values, Stream(seed=1, name="weights"))
    >>> bool(values.min() > 0), bool(values.max() < 1)
    (True, True)
    """
    flat, words = values.view(-1), key(stream.seed, stream.name, stream.step)
    for start in range(0, len(flat), _DRAWS * _CHUNK):
        piece = flat[start : start + _DRAWS * _CHUNK]
        first, last = start // _DRAWS, -(-(start + len(piece)) // _DRAWS)
        # Numbers from -1/2 up to 1/2, by steps of 2^-16; half a step and 1/2 lead into (0, 1).
        draws = mixed(first, last, words, flat.device).view(torch.int16)[: len(piece)]
        piece.add_(draws, alpha=2.0**-16).add_(0.5 + 2.0**-17)
        del draws  # before the next are made


def drawing_bytes(elements: int) -> int:
    """Bytes that `add_uniforms` takes while it works, in addition to so many elements.

    Of a word it has the draws as numbers of fp32 next to them.
    """
    return 24 * min(-(-elements // _DRAWS), _CHUNK)


def transforming_bytes(elements: int) -> int:
    """Bytes that `hadamard` takes while it works, in addition to what it makes."""
    return 4 * min(elements, HADAMARD * _BLOCKS)
