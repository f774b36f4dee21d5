"""Small integers in as many bits as each block of them needs, in vectorised torch.

A number of w bits is split into pieces of 1, 2, 4, 8 and 16 bits, those that add up to w. All
blocks whose width has a piece of, say, 4 bits pack it together, two to a byte; so there are five
steps whatever the widths, and nothing loops over blocks or numbers. Bytes are little-endian.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64
WIDEST = 31
_PIECES = (1, 2, 4, 8, 16)
# Eight bytes of 0 or 1, times this, have their bits side by side in the highest byte.
_GATHER = sum(1 << (56 - 7 * place) for place in range(8))
_SPREAD = 0x0101010101010101
# Bit i of byte i: a negative number where the highest one is set.
_DIAGONAL = sum(1 << (9 * place) for place in range(7)) - (1 << 63)


def pack_bits(mask: Tensor) -> Tensor:
    """A bool tensor as bits: uint8 [ceil(n / 8)], the first in the lowest bit.

    >>> pack_bits(torch.tensor([True, False, True])).tolist()
    [5]
    """
    flat = mask.reshape(-1)
    flat = F.pad(flat, (0, -flat.numel() % 8)).view(torch.uint8)
    return ((flat.view(torch.int64) * _GATHER) >> 56).to(torch.uint8)


def unpack_bits(bits: Tensor, count: int) -> Tensor:
    """The first `count` bits as bool [count].

    >>> unpack_bits(torch.tensor([5], dtype=torch.uint8), 3).tolist()
    [True, False, True]
    """
    spread = (bits.to(torch.int64) * _SPREAD) & _DIAGONAL
    return spread.view(torch.uint8)[:count] != 0


def pack_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers in blocks of 64: the width of each block in bits, and all blocks' bits.

    Args:
        values: int32 [n], none negative.

    Returns:
        uint8 [ceil(n / 64)] and uint8 [8 * the sum of the widths].

    >>> widths, payload = pack_blocks(torch.arange(100, dtype=torch.int32))
    >>> widths.tolist(), len(payload)
    ([6, 7], 104)
    """
    blocks = _blocks(values)
    widths = _widths(blocks)
    streams = []
    for piece in _PIECES:
        chosen = ((widths & piece) != 0).nonzero().squeeze(1)
        if chosen.numel():
            shift = (widths[chosen] & (piece - 1)).to(torch.int32)
            streams.append(_together(blocks[chosen] >> shift[:, None], piece))
    payload = torch.cat(streams) if streams else values.new_empty(0, dtype=torch.uint8)
    return widths, payload


def unpack_blocks(widths: Tensor, payload: Tensor, count: int) -> Tensor:
    """The `count` numbers that `pack_blocks` packed: int32 [count].

    Raises:
        ValueError: the widths do not belong to so many numbers or to so many bytes.
    """
    if (widths > WIDEST).any():
        raise ValueError(f"a width of {int(widths.max())} bits")
    if len(widths) != -(-count // BLOCK) or len(payload) != _payload_bytes(widths):
        raise ValueError(f"{len(widths)} widths, {len(payload)} bytes for {count} numbers")
    blocks = torch.zeros(len(widths), BLOCK, dtype=torch.int32, device=widths.device)
    start = 0
    for piece in _PIECES:
        chosen = ((widths & piece) != 0).nonzero().squeeze(1)
        stop = start + chosen.numel() * BLOCK * piece // 8
        if stop > start:
            shift = (widths[chosen] & (piece - 1)).to(torch.int32)
            blocks[chosen] |= _apart(payload[start:stop], piece).view(-1, BLOCK) << shift[:, None]
        start = stop
    return blocks.view(-1)[:count]


def packed_bytes(values: Tensor) -> int:
    """How many bytes `pack_blocks` takes for int32 [n], widths and all.

    >>> packed_bytes(torch.arange(100, dtype=torch.int32))
    106
    """
    widths = _widths(_blocks(values))
    return len(widths) + _payload_bytes(widths)


def _blocks(values: Tensor) -> Tensor:
    return F.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)


def _widths(blocks: Tensor) -> Tensor:
    """The bits that the largest number of each block needs: int32 [n, 64] to uint8 [n]."""
    # A number below 2^53 is exact in float64, and its exponent is its width.
    return torch.frexp(blocks.amax(1).double()).exponent.to(torch.uint8)


def _payload_bytes(widths: Tensor) -> int:
    return int(widths.sum(dtype=torch.int64)) * BLOCK // 8


def _together(values: Tensor, bits: int) -> Tensor:
    """The lowest `bits` of each number, as bytes."""
    values = values.reshape(-1)
    if bits == 16:
        return values.to(torch.int16).view(torch.uint8)
    fields = values.to(torch.uint8)
    if bits < 8:
        fields &= (1 << bits) - 1
    if bits == 4:
        pairs = fields.view(torch.int16)
        fields = (pairs | (pairs >> 4)).to(torch.uint8)
    elif bits == 2:
        fours = fields.view(torch.int32)
        fields = (fours | (fours >> 6) | (fours >> 12) | (fours >> 18)).to(torch.uint8)
    elif bits == 1:
        fields = ((fields.view(torch.int64) * _GATHER) >> 56).to(torch.uint8)
    return fields


def _apart(stream: Tensor, bits: int) -> Tensor:
    """Bytes as int32 numbers of `bits` bits each."""
    if bits == 16:
        # A copy, since the stream may begin at an odd place.
        return stream.clone().view(torch.int16).to(torch.int32) & 0xFFFF
    if bits == 4:
        pairs = stream.to(torch.int16)
        stream = ((pairs | (pairs << 4)) & 0x0F0F).view(torch.uint8)
    elif bits == 2:
        fours = stream.to(torch.int32)
        fours = fours | (fours << 6) | (fours << 12) | (fours << 18)
        stream = (fours & 0x03030303).view(torch.uint8)
    elif bits == 1:
        stream = unpack_bits(stream, 8 * len(stream))
    return stream.to(torch.int32)
