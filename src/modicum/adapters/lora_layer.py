"""What LoRA and its kin compute at a layer: its output, and a product of two thin matrices."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.adapters.adapter_layer import AdapterLayer
from modicum.adapters.base_weights import at_least_fp32
from modicum.adapters.convolutions import plus_convolved
from modicum.adapters.fused import compute_dtype, plus_low_rank
from modicum.core.ranks.sharding import whole

if TYPE_CHECKING:
    from modicum.adapters.lora import LoRA


class LoRALayer(AdapterLayer):
    """y = W x + b + s B (A dropout(x)), with A [r, in], B [out, r] and s as its method has it."""

    method: LoRA
    A: Tensor
    B: Tensor

    @cached_property
    def scale(self) -> float:
        """s of this site."""
        return self.method.at(self.site).scale

    def forward(self, inputs: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        return self.plus_low_rank(base, inputs, *self.matrices(), self.dropout)

    def matrices(self) -> tuple[Tensor, Tensor]:
        """A and B, as a forward pass uses them."""
        return self.A, self.B

    def plus_low_rank(
        self, base: Callable[[Tensor], Tensor], inputs: Tensor, a: Tensor, b: Tensor, dropout: float
    ) -> Tensor:
        """The base's output plus s B (A dropout(x))."""
        scale = self.scale
        if self.site.kind == "embedding":
            outputs = base(inputs)
            return (outputs + scale * self._rows(inputs, a, b)).to(outputs.dtype)
        if self.site.kind == "convolution":
            dtype, options = compute_dtype(inputs, a), {"scale": scale, "dropout": dropout}
            return plus_convolved(self.layer, inputs, base, a, b, dtype, **options)
        return plus_low_rank(inputs, base, a, b, scale, dropout)

    def _rows(self, entries: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Rows of A^T B^T as the embedding gives its own: scaled, none for the entry of padding."""
        layer = self.layer
        assert isinstance(layer, nn.Embedding)
        by_count = layer.scale_grad_by_freq
        rows = F.embedding(entries, a.T, layer.padding_idx, scale_grad_by_freq=by_count) @ b.T
        factor = getattr(layer, "embed_scale", None)
        return rows if factor is None else rows * torch.as_tensor(factor).to(rows)

    def delta(self) -> Tensor:
        a, b, scale = self.as_lora()
        return scale * (at_least_fp32(b) @ at_least_fp32(a))

    def as_lora(self) -> tuple[Tensor, Tensor, float]:
        a, b = self.matrices()
        return whole(a), whole(b), self.scale
