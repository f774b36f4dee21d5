"""Frozen weights in tiles of a scale, a float zero point, and codes of two to four bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.layers.form_layer import TensorShapes
from modicum.core.ranks.sharding import is_sharded, laid_out_like, own_part, whole
from modicum.linears.frozen import FrozenLinear, chunk_of

_PIECES = (1, 2, 4)  # bits: a code of three has one of one and one of two
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_TINY = torch.finfo(torch.float32).tiny


class CodedTiles(FrozenLinear):
    """A frozen W [out, in] in tiles: of each W = scale * code + zero, codes in 0 ... 2^bits - 1.

    All tensors have a row for each row of tiles, so no shard goes through a tile. Tiles at the
    lower and right edge may be short.

    Attributes:
        codes: uint8 [tile rows, bytes], packed.
        scales, zeros: numbers [tile rows, tile columns] as bytes, so that a cast of the model
            leaves them alone; `zero_points` shows the latter as numbers.
    """

    codes: nn.Parameter
    scales: nn.Parameter
    zeros: nn.Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bits: int = 4,
        tile_rows: int = 8,
        tile_columns: int = 4,
        zero_points: str = "fp16",
    ) -> None:
        asked = {"bits": bits, "tile_rows": tile_rows, "tile_columns": tile_columns}
        self._asked = {**asked, "zero_points": zero_points}
        self.bits, self._tile, self.numbers = bits, (tile_rows, tile_columns), _DTYPES[zero_points]
        super().__init__(in_features, out_features, bias, device, dtype, **self._asked)

    @classmethod
    def coded(
        cls,
        in_features: int,
        out_features: int,
        bits: int = 4,
        tile_rows: int = 8,
        tile_columns: int = 4,
        zero_points: str = "fp16",
        **_: Any,
    ) -> TensorShapes:
        rows, columns = -(-out_features // tile_rows), -(-in_features // tile_columns)
        numbers = columns * _DTYPES[zero_points].itemsize
        codes = tile_rows * bits * -(-columns * tile_columns // 8)
        return {"codes": (rows, codes), "scales": (rows, numbers), "zeros": (rows, numbers)}

    def arguments(self) -> dict[str, Any]:
        return dict(self._asked)

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a tile."""
        return self._tile

    @property
    def outputs_a_row(self) -> int:
        """The rows of a tile."""
        return self._tile[0]

    @property
    def zero_points(self) -> Tensor:
        """The zero points as numbers [tile rows, tile columns]; of a shard, this rank's rows."""
        return own_part(self.zeros.detach())[0].view(self.numbers)

    def frozen_how(self) -> tuple[str, ...]:
        rows, columns = self._tile
        numbers = self._asked["zero_points"]
        return str(self.out_features), str(self.bits), str(rows), str(columns), str(numbers)

    @classmethod
    def frozen_weight(
        cls, held: tuple[Tensor, ...], columns: int, dtype: torch.dtype, *how: str
    ) -> Tensor:
        """The weight of one product."""
        *sizes, numbers = how
        outs, bits, *tile = (int(size) for size in sizes)
        shape = [outs, columns, *tile]
        weight: Tensor = decode_tiles(*held, shape, bits, _DTYPES[numbers], dtype)
        return weight

    def to_dense(self) -> Tensor:
        """The weight that the tiles represent: float32 [out, in].

        Where they are sharded every rank calls this, as rows of a weight are sharded otherwise than
        rows of tiles.
        """
        held = tuple(whole(tensor) for tensor in self.frozen_tensors())
        weight = self.frozen_weight(held, self.in_features, torch.float32, *self.frozen_how())
        return laid_out_like(weight, self.codes) if is_sharded(self.codes) else weight

    def code(self, weight: Tensor, held: Sequence[Tensor]) -> None:
        rows, most = self._tile[0], 2**self.bits - 1
        for part in _chunks(held[0], rows * self.in_features):
            tiles = _tiled(weight[part.start * rows : part.stop * rows], self._tile)
            tiles = tiles.to(held[0].device, torch.float32)
            low, high = tiles.amin((1, 3)), tiles.amax((1, 3))
            zeros = _not_below(low, self.numbers)
            scales = ((high - zeros.float()).clamp_min(0) / most).to(self.numbers)
            if (zeros.isinf() & low.isfinite()).any() or (scales.isinf() & high.isfinite()).any():
                problem = "a weight is too large for zero points of fp16; take bf16 or fp32"
                raise InputError(problem, field="zero_points", value=self._asked["zero_points"])
            # Nearest to what the rounded numbers represent, so that less is lost.
            each = scales[:, None, :, None].float().clamp_min(_TINY)
            codes = ((tiles - zeros[:, None, :, None].float()) / each).round_().clamp_(0, most)
            packed = _pack(codes.nan_to_num_(0).to(torch.uint8).flatten(2), self.bits)
            for own, piece in zip(held, (packed.flatten(1), scales, zeros), strict=True):
                own[part].copy_(piece.view(torch.uint8))

    def shift(self, change: Tensor) -> Mapping[str, Tensor] | None:
        """The zero points that take a change, if it is one number in each tile."""
        tiles = _tiled(change, self._tile)
        each = tiles[:, :1, :, :1]
        if not bool((tiles == each).all()):
            return None
        zeros = (self.zero_points + each[:, 0, :, 0]).to(self.numbers)
        return {"zeros": zeros.view(torch.uint8)}

    @classmethod
    def workspace(
        cls,
        in_features: int,
        out_features: int,
        item_bytes: int,
        device: str = "cpu",
        tile_rows: int = 8,
        tile_columns: int = 4,
        **_: Any,
    ) -> int:
        """Bytes of the weight while it is used, and of what a chunk of it is made in."""
        row = tile_rows * tile_columns * -(-in_features // tile_columns)
        chunk = max(1, min(-(-out_features // tile_rows), chunk_of(device) // max(1, row))) * row
        return in_features * out_features * item_bytes + 5 * chunk  # a code, and a number in fp32


# An operator of its own, so that compiled graphs hold it as one.
@torch.library.custom_op("modicum::decode_tiles", mutates_args=())
def decode_tiles(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    shape: Sequence[int],
    bits: int,
    numbers: torch.dtype,
    dtype: torch.dtype,
) -> Tensor:
    """The weight [out, in] in `dtype`; `shape` is out, in, and the rows and columns of a tile."""
    outs, ins, rows, columns = shape
    weight = torch.empty(outs, ins, dtype=dtype, device=codes.device)
    for part in _chunks(codes, rows * ins):
        scale, zero = (each[part].view(numbers).float() for each in (scales, zeros))
        packed = codes[part].unflatten(1, (rows, -1))
        own = weight[part.start * rows : part.stop * rows]
        _decode_into(own, packed, scale[:, None, :, None], zero[:, None, :, None], bits, columns)
    return weight


def _decode_into(
    weight: Tensor, packed: Tensor, scale: Tensor, zero: Tensor, bits: int, columns: int
) -> None:
    values = _unpack(packed, bits)[..., : scale.shape[2] * columns].float()
    values.unflatten(2, (-1, columns)).mul_(scale).add_(zero)
    weight.copy_(values.flatten(0, 1)[: weight.shape[0], : weight.shape[1]])


@decode_tiles.register_fake
def _(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    shape: Sequence[int],
    bits: int,
    numbers: torch.dtype,
    dtype: torch.dtype,
) -> Tensor:
    return codes.new_empty((shape[0], shape[1]), dtype=dtype)


def _not_below(low: Tensor, numbers: torch.dtype) -> Tensor:
    """The least numbers of a dtype that are no less than these in fp32.

    So the least weight of a tile has the code 0 and its largest the last one, also where both are
    alike but for rounding: what a tile represents is coded to itself.
    """
    near = low.to(numbers)
    if numbers == torch.float32:
        return near
    away = torch.where(near < 0, -1, 1).to(torch.int16)
    above = (near.view(torch.int16) + away).view(numbers)  # the next one in the order of numbers
    return torch.where(near.float() < low, above, near)


def _tiled(weight: Tensor, tile: tuple[int, int]) -> Tensor:
    """Rows [n, in] as [tile rows, rows of a tile, tile columns, columns of a tile].

    Short tiles are filled with their own last row and column, which no least or largest feels.
    """
    for dim, (size, part) in enumerate(zip(weight.shape, tile, strict=True)):
        if size % part:
            places = torch.arange(size + -size % part, device=weight.device).clamp_(max=size - 1)
            weight = weight.index_select(dim, places)
    return weight.unflatten(1, (-1, tile[1])).unflatten(0, (-1, tile[0]))


def _chunks(codes: Tensor, row: int) -> Iterator[slice]:
    """The rows of tiles, so many at a time as make a chunk of weights; one has `row` of them."""
    step = max(1, chunk_of(codes.device.type) // max(1, row))
    for start in range(0, codes.shape[0], step):
        yield slice(start, min(start + step, codes.shape[0]))


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., n] as bytes: their lowest bits by themselves first, where bits are three."""
    codes, packed, below = F.pad(codes, (0, -codes.shape[-1] % 8)), [], 0
    for piece in _PIECES:
        if bits & piece:
            places = torch.arange(0, 8, piece, device=codes.device, dtype=torch.uint8)
            part = (codes >> below) & (2**piece - 1)
            part = part.unflatten(-1, (-1, 8 // piece)) << places
            packed.append(part.sum(-1, dtype=torch.uint8))
            below += piece
    return torch.cat(packed, dim=-1)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """What `_pack` packed, filled up to eights: uint8."""
    eights, codes, below = packed.shape[-1] // bits, None, 0
    for piece in _PIECES:
        if bits & piece:
            part = packed[..., below * eights : (below + piece) * eights]
            table = _table(piece, packed.device)
            found = table.index_select(0, part.flatten().int()).view(torch.uint8)
            found = found.view(*packed.shape[:-1], 8 * eights)
            codes = found if codes is None else codes | (found << below)
            below += piece
    assert codes is not None
    return codes


@cache
def _table(piece: int, device: torch.device) -> Tensor:
    """The codes in each of the 256 bytes, as one element of a table."""
    places = torch.arange(0, 8, piece, device=device)
    codes = (torch.arange(256, device=device)[:, None] >> places) & (2**piece - 1)
    wide = {1: torch.int64, 2: torch.int32, 4: torch.int16}[piece]
    return codes.to(torch.uint8).view(wide).flatten()
