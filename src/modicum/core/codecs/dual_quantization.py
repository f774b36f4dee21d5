"""Error-bounded compression: integers, predicted from neighbours and packed in blocks."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from modicum.core.codecs.bit_packing import (
    pack_bits,
    pack_blocks,
    packed_bytes,
    unpack_bits,
    unpack_blocks,
)
from modicum.core.codecs.error_bounded import (
    CODINGS,
    DTYPES,
    CodedMaps,
    Coding,
    CompressedTensor,
    laid_out,
    strides_of,
)
from modicum.core.errors import InputError

# Bins are a little narrower than the bound allows, so that rounding at their edges stays inside.
_NARROWER = 1 - 2.0**-10
# Elements that are coded together: few enough for a processor's cache, enough for an accelerator.
_PIECE = {"cpu": 1 << 17}
_PIECE_ELSEWHERE = 1 << 21


@dataclass(frozen=True)
class DualQuantization:
    """Error-bounded compression in the manner of SZ: integers first, predictions on them.

    An element a becomes q = round(a / 2e), and comes back as 2eq, at most e away. Where q is 0 and
    a is not, it comes back as e/6 with its sign: so zeros stay zeros and signs stay signs, also of
    elements that are smaller than the bound, and a ReLU's mask survives. (Of what is below e after
    a ReLU the mean is nearer to e/2; but with e/6 the errors of *all* bins have nearly mean 0, as
    Euler and Maclaurin say of a density that falls from 0 on.) Numbers are exact, so what predicts
    one from its neighbours (in a row, or in a plane: left + up - up-left) loses nothing.
    What is left is packed into the bits that each block of 64 needs. Whichever way is the smallest
    on the first of the tensor's pieces is taken for all. What no bin can hold under the bound
    (NaN, infinities, numbers beyond `radius`) is kept as it was, to the bit; so is an entire piece
    that would not become smaller.

    On CUDA everything runs there. Prefer it where errors must be bounded; where a given number of
    bits must be kept, quantize instead.

    Args:
        radius: the largest number that has a bin, at most 2^26.
        entropy: `bits` packs blocks; `zlib` codes bytes by zlib's level 1, on the CPU whatever the
            tensor's device, and slower by far.

    Source: Tian et al., "cuSZ", PACT 2020 (arXiv 2007.09625), section 3.1 (dual quantization,
    Lorenzo prediction). There 0 represents what is below e too, whose signs are lost.

    >>> codec = DualQuantization()
    >>> activations = torch.relu(torch.randn(8, 16, 32, 32))
    >>> record = codec.compress(activations, absolute_bound=0.05)
    >>> restored = codec.decompress(record)
    >>> bool((restored - activations).abs().max() <= 0.05), record.nbytes < activations.nbytes / 5
    (True, True)
    >>> torch.equal(restored > 0, activations > 0)
    True
    """

    radius: int = 1 << 15
    entropy: Literal["bits", "zlib"] = "bits"

    @torch.no_grad()
    def compress(self, tensor: Tensor, absolute_bound: float) -> CompressedTensor:
        """The record of a floating-point tensor.

        Raises:
            InputError: the bound is not a positive number, or the tensor's dtype none of fp16,
                bf16, fp32 and fp64.
        """
        if not (absolute_bound > 0 and math.isfinite(absolute_bound)):
            raise InputError(
                "a bound on errors must be a positive number",
                field="absolute_bound",
                value=absolute_bound,
            )
        if tensor.dtype not in DTYPES:
            raise InputError(
                "only tensors of floating-point numbers are compressed under a bound",
                value=str(tensor.dtype),
                allowed=", ".join(map(str, DTYPES)),
            )
        tensor = tensor.detach()
        pieces: list[CodedMaps] = []
        coding: Coding | None = None
        for maps in _cut(tensor):
            numbered = _Numbered.of(maps, absolute_bound, self.radius)
            coding = coding or numbered.smallest()
            pieces.append(numbered.piece(coding, self.entropy) or _kept(maps))
        shape = tuple(tensor.shape)
        return CompressedTensor(
            shape, strides_of(tensor), tensor.dtype, tensor.device, tuple(pieces)
        )

    @torch.no_grad()
    def decompress(self, record: CompressedTensor) -> Tensor:
        """The tensor, each element at most the bound away from what it was."""
        parts = (_elements(piece, record.dtype) for piece in record.pieces)
        return laid_out(parts, record, record.dtype)

    @torch.no_grad()
    def nonzero(self, record: CompressedTensor) -> Tensor:
        """Where the tensor was not zero; cheaper than its elements where zeros have a mask."""
        parts = (_nonzero(piece, record.dtype) for piece in record.pieces)
        return laid_out(parts, record, torch.bool)


@dataclass(frozen=True)
class _Numbered:
    """Maps as signed integers, int32 [number, height, width], and what has no number."""

    numbers: Tensor
    half: float
    signed: bool
    exceptions: dict[str, Tensor]
    limit: int

    @classmethod
    def of(cls, maps: Tensor, bound: float, radius: int) -> _Numbered:
        """Number the elements, decode them as they will be, and except those that miss."""
        low, high = (float(value) for value in maps.aminmax())
        largest, signed = max(abs(low), abs(high)), not low >= 0
        # What comes back is rounded to the dtype, which may take up to half of the bound.
        rounding = largest * torch.finfo(maps.dtype).eps / (2 * bound)
        half = bound * min(_NARROWER, max(0.5, 1 - rounding) if rounding < 1 else 0.5)
        wide = maps.to(_working(maps.dtype))
        signs = wide.sign()
        numbers = (wide / (2 * half)).add_(signs, alpha=0.5).clamp_(-radius, radius)
        # Truncation rounds here; and what is not 0 is moved away from it by one.
        numbers = numbers.to(torch.int32).add_(signs.to(torch.int32))
        restored = _decoded(numbers, half, maps.dtype).to(wide.dtype)
        missed = ~((wide - restored).abs_() <= bound)
        # A bound below the smallest number that there is would turn small elements into zeros.
        missed |= (restored == 0) & (wide != 0)
        exceptions = {}
        if bool(missed.any()):
            places = missed.view(-1).nonzero().squeeze(1)
            exceptions = {"places": places.to(torch.int32), "values": maps.view(-1)[places]}
            numbers.masked_fill_(missed, 0)
        return cls(numbers, half, signed, exceptions, maps.nbytes)

    def smallest(self) -> Coding:
        """The coding that takes the fewest bytes."""
        costs: dict[Coding, int] = {"sparse": packed_bytes(self.coded("sparse"))}
        costs["sparse"] += self.numbers.numel() // 8
        for coding in CODINGS[2:]:
            costs[coding] = packed_bytes(self.coded(coding))
        return min(costs, key=lambda coding: costs[coding])

    def coded(self, coding: Coding) -> Tensor:
        """What is packed: int32 [n], none negative."""
        numbers = self.numbers
        if coding == "sparse":
            numbers = numbers[numbers != 0]
            away = numbers.abs() - 1
            return (away << 1) | (numbers < 0) if self.signed else away
        if coding == "dense" and not self.signed:
            return numbers.view(-1)
        return _zigzag(_predicted(numbers, coding)).view(-1)

    def piece(self, coding: Coding, entropy: str) -> CodedMaps | None:
        """The piece in this coding; None where it would be no smaller than the elements."""
        coded, parts = self.coded(coding), dict(self.exceptions)
        if coding == "sparse":
            parts["mask"] = pack_bits(self.numbers != 0)
        if entropy == "zlib":
            parts["deflated"] = _deflated(coded)
        else:
            parts["widths"], parts["payload"] = pack_blocks(coded)
        maps = self.numbers.shape
        piece = CodedMaps(coding, (maps[0], maps[1], maps[2]), self.half, self.signed, parts)
        return piece if piece.nbytes < self.limit else None


def _kept(maps: Tensor) -> CodedMaps:
    shape = maps.shape
    elements = {"elements": maps.reshape(-1).clone()}
    return CodedMaps("raw", (shape[0], shape[1], shape[2]), 0.0, True, elements)


def _elements(piece: CodedMaps, dtype: torch.dtype) -> Tensor:
    """The elements of a piece, as they come back: [count]."""
    parts = piece.parts
    if piece.coding == "raw":
        return parts["elements"]
    if piece.coding == "sparse":
        mask = unpack_bits(parts["mask"], piece.count)
        codes = _unpack_numbers(piece, int(mask.sum()))
        away = (codes >> 1 if piece.signed else codes) + 1
        numbers = torch.where((codes & 1).bool(), -away, away) if piece.signed else away
        elements = torch.zeros(piece.count, dtype=dtype, device=mask.device)
        elements.masked_scatter_(mask, _decoded(numbers, piece.half, dtype))
    else:
        numbers = _unpack_numbers(piece, piece.count)
        if piece.coding != "dense" or piece.signed:
            numbers = (numbers >> 1) ^ -(numbers & 1)
        numbers = _summed(numbers.view(piece.maps), piece.coding).view(-1)
        elements = _decoded(numbers, piece.half, dtype)
    if "places" in parts:
        elements[parts["places"].long()] = parts["values"]
    return elements


def _nonzero(piece: CodedMaps, dtype: torch.dtype) -> Tensor:
    if piece.coding != "sparse":
        return _elements(piece, dtype) != 0
    mask = unpack_bits(piece.parts["mask"], piece.count)
    if "places" in piece.parts:
        mask[piece.parts["places"].long()] = True
    return mask


def _unpack_numbers(piece: CodedMaps, count: int) -> Tensor:
    """The numbers that a piece packed: int32 [count]."""
    parts = piece.parts
    if "widths" in parts:
        return unpack_blocks(parts["widths"], parts["payload"], count)
    data = zlib.decompress(parts["deflated"].cpu().numpy().tobytes())
    kind = torch.uint8 if len(data) == count else torch.int32
    if not data:
        return torch.empty(0, dtype=torch.int32, device=parts["deflated"].device)
    numbers = torch.frombuffer(bytearray(data), dtype=kind).to(torch.int32)
    return numbers.to(parts["deflated"].device)


def _deflated(numbers: Tensor) -> Tensor:
    """Numbers as bytes, or four each where one is too small, by zlib."""
    wide = numbers.numel() and int(numbers.max()) > 255
    plain = numbers.to(torch.int32 if wide else torch.uint8).cpu().numpy()
    packed = torch.frombuffer(bytearray(zlib.compress(plain.tobytes(), 1)), dtype=torch.uint8)
    return packed.to(numbers.device)


def _decoded(numbers: Tensor, half: float, dtype: torch.dtype) -> Tensor:
    """What numbers come back as."""
    signs = numbers.sign()
    away = numbers - signs
    working = _working(dtype)
    small = signs.to(working) * (half / 6)
    return torch.where(away == 0, small, away.to(working) * (2 * half)).to(dtype)


def _predicted(numbers: Tensor, coding: Coding) -> Tensor:
    """What neighbours within a map leave of each number; the first of a row has the one above."""
    if coding in ("row", "plane"):
        numbers = numbers.diff(dim=2, prepend=torch.zeros_like(numbers[..., :1]))
        above = numbers if coding == "plane" else numbers[..., :1]
        above[:, 1:] -= above[:, :-1].clone()
    return numbers


def _summed(left: Tensor, coding: Coding) -> Tensor:
    """The numbers of which neighbours left this."""
    if coding in ("row", "plane"):
        above = left if coding == "plane" else left[..., :1]
        above.copy_(above.cumsum(1, dtype=torch.int32))
        left = left.cumsum(2, dtype=torch.int32)
    return left


def _zigzag(numbers: Tensor) -> Tensor:
    """0, -1, 1, -2, 2 as 0, 1, 2, 3, 4."""
    return (numbers << 1) ^ (numbers >> 31)


def _working(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _cut(tensor: Tensor) -> Iterator[Tensor]:
    """Contiguous [number, height, width] of at most so many elements, in the tensor's order."""
    while tensor.dim() < 3:
        tensor = tensor[None]
    size = _PIECE.get(tensor.device.type, _PIECE_ELSEWHERE)
    if tensor.numel() > size:
        along = next(place for place, length in enumerate(tensor.shape) if length > 1)
        each = tensor.numel() // tensor.shape[along]
        for part in tensor.split(max(1, size // each), along):
            yield from _cut(part)
    elif tensor.numel():
        yield tensor.reshape(-1, *tensor.shape[-2:]).contiguous()
