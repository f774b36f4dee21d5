"""A form that trains: a weight of which only blocks along the diagonal are there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.core.contracts.method import Info, PositiveInt
from modicum.core.layers.form_layer import FormLayer, TensorShapes
from modicum.core.ranks.sharding import cut_alike, own_part
from modicum.linears import LinearMethod


class BlockDiagonalLinear(FormLayer):
    """y = x W^T + b, W [out, in] with b blocks; the last of each side may be short.

    Attributes:
        kept: [out, ceil(in / b)], of each row the entries of its block.
    """

    kept: nn.Parameter

    def __init__(self, *sizes: Any, blocks: int = 2, **where: Any) -> None:
        super().__init__(*sizes, blocks=blocks, **where)
        self.blocks = blocks
        self.rows, self.columns = -(-self.out_features // blocks), self.kept.shape[1]

    @classmethod
    def shapes(cls, in_features: int, out_features: int, **arguments: Any) -> TensorShapes:
        return {"kept": (out_features, -(-in_features // arguments["blocks"]))}

    def arguments(self) -> dict[str, Any]:
        return {"blocks": self.blocks}

    def forward(self, inputs: Tensor) -> Tensor:
        padded, kept = inputs, self.kept
        if short := self.blocks * self.columns - self.in_features:
            padded = F.pad(padded, (0, short))
        if short := self.blocks * self.rows - self.out_features:
            kept = F.pad(kept, (0, 0, 0, short))
        parts = padded.unflatten(-1, (self.blocks, self.columns))
        blocks = kept.unflatten(0, (self.blocks, self.rows))
        out = torch.einsum("...bc,brc->...br", parts, blocks).flatten(-2)
        out = out[..., : self.out_features]
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def to_dense(self) -> Tensor:
        kept, before = own_part(self.kept)
        dense = kept.new_zeros(len(kept), self.blocks * self.columns)
        dense = dense.scatter(1, self._places(before, len(kept)), kept)[:, : self.in_features]
        return cut_alike(dense, self.kept, self.in_features)

    def fitted(self, weight: Tensor) -> Mapping[str, Tensor]:
        padded = F.pad(weight, (0, self.blocks * self.columns - self.in_features))
        return {"kept": padded.gather(1, self._places(0, self.out_features))}

    def _places(self, before: int, rows: int) -> Tensor:
        """Of some rows the columns of the entries that are kept: int64 [rows, columns]."""
        block = torch.arange(before, before + rows, device=self.kept.device) // self.rows
        each = torch.arange(self.columns, device=self.kept.device)
        return block[:, None] * self.columns + each


class BlockDiagonal(LinearMethod):
    """Weights of blocks along the diagonal, trained."""

    info = Info(
        name="block_diagonal",
        title="Block-diagonal weights",
        room="linears",
        paper="none",
        claim="fewer elements",
        traits=("holds_trained_forms", "mergeable", "exact_resume", "compiles"),
        tiny={"blocks": 2},
    )
    layer = BlockDiagonalLinear

    blocks: PositiveInt = 4
