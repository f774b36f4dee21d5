"""Moments in 8 bits whose blocks stay within a row, so that a part of the rows is coded alike.

A moment of a parameter [rows, ...] is uint8 codes of the parameter's shape and fp32 scales
[rows, blocks]. A block is 256 elements of one row, or the row where that is shorter. Whoever holds
some of the rows, as a rank does of a sharded parameter, has the codes and scales that it would have
of all of them: any number of ranks takes the state up without changing a bit.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861, sections
2 and 3. There blocks are of 2048 elements in the order of memory; 256 is bitsandbytes' size today.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from modicum.optim.quantized import BLOCK, lookup, nearest

# Elements that are updated at a time, which bounds the scratch memory. On an accelerator starting
# the kernels of fewer takes longer than the kernels do.
CHUNK, ACCELERATOR_CHUNK = 1 << 20, 1 << 22
_TINY = torch.finfo(torch.float32).tiny


def width_of(shape: Sequence[int]) -> int:
    """Elements of a row: of a slice along dimension 0."""
    return math.prod(shape[1:])


def blocks_of(shape: Sequence[int]) -> int:
    """Scales of a row."""
    return -(-width_of(shape) // _block(width_of(shape)))


def is_coded(shape: Sequence[int], smallest: int) -> bool:
    """Whether moments of a parameter of this full shape are coded: those of matrices large enough.

    >>> is_coded((64, 64), 4096), is_coded((4096,), 4096), is_coded((4096, 1), 4096)
    (True, False, False)
    """
    return len(shape) > 1 and width_of(shape) > 1 and math.prod(shape) >= smallest


def encode(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes [rows, width] (uint8) and scales [rows, blocks] of fp32 values [rows, width].

    Without a sign, what is not in a block of zeros has no code that represents zero. A second
    moment that is read as zero, next to a first one that is not, would make a step of any size.
    """
    rows, width = values.shape
    block = _block(width)
    blocks = -(-width // block)
    padded = F.pad(values, (0, -width % block)).view(rows, blocks, block)
    scales = padded.abs().amax(dim=2)
    scaled = padded / scales.clamp_min(_TINY)[:, :, None]
    codes = nearest(scaled, signed=signed)
    if not signed:
        codes.clamp_(min=1)
    return codes.view(rows, blocks * block)[:, :width], scales


def decode(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """The values that codes [rows, width] and scales [rows, blocks] represent: fp32 [rows, width].

    >>> codes, scales = encode(torch.tensor([[0.5, -1.0, 0.0]]), signed=True)
    >>> [round(value, 2) for value in decode(codes, scales, signed=True)[0].tolist()]
    [0.5, -0.99, 0.0]
    """
    rows, width = codes.shape
    block = _block(width)
    values, _ = lookup(signed, codes.device)
    found = values.index_select(0, codes.reshape(-1).int()).view(rows, width)
    found = F.pad(found, (0, -width % block)).view(*scales.shape, block)
    return found.mul_(scales[:, :, None]).view(rows, scales.shape[1] * block)[:, :width]


def kept_bytes(shape: Sequence[int], rows: int, *, coded: bool) -> int:
    """Bytes of one moment of so many rows of a parameter."""
    elements = rows * width_of(shape)
    return elements + 4 * rows * blocks_of(shape) if coded else 4 * elements


def chunk_rows(shape: Sequence[int], device: str = "cpu") -> int:
    """Rows that are updated at a time.

    >>> chunk_rows((8192, 1024)), chunk_rows((8192, 1024), "cuda")
    (1024, 4096)
    """
    most = CHUNK if device == "cpu" else ACCELERATOR_CHUNK
    return max(1, most // (blocks_of(shape) * _block(width_of(shape))))


def _block(width: int) -> int:
    return max(1, min(BLOCK, width))
