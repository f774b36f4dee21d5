"""A policy on activations in a trace: shares of bytes in place of what a codec makes of data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modicum.core.layers.saved_tensors import SavedTensors, Shares
from modicum.core.layers.torch_calls import Call
from modicum.core.layers.trace_moves import InPieces, Scratch
from modicum.core.ranks.ranks import Ranks
from modicum.memory.activations import Activations
from modicum.memory.base import ActivationPolicy


@dataclass(frozen=True)
class ForeseenRecord:
    """What is kept of a tensor: so many bytes, and how it was laid out."""

    kept: Tensor
    like: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return self.kept.nbytes


class ShareCodec:
    """A codec that looks at no data: a share of each tensor's bytes is left.

    Args:
        shares: what is left, and what the way there and back takes.
        works_in: is called with that.
    """

    def __init__(self, shares: Shares, works_in: Callable[[Scratch], None]) -> None:
        self._shares, self._works_in = shares, works_in

    def compress(self, tensor: Tensor, absolute_bound: float) -> ForeseenRecord:
        """A record of the share's bytes, as many for each row."""
        rows = max(1, tensor.shape[0])
        each = round(self._shares.values * tensor.nbytes / rows)
        kept = torch.empty(rows * each, dtype=torch.uint8, device=tensor.device)
        self._note(self._shares.storing, tensor.numel())
        return ForeseenRecord(kept, tensor.shape, tensor.stride(), tensor.dtype)

    def decompress(self, record: ForeseenRecord) -> Tensor:
        """A tensor of the same layout."""
        made = torch.empty_strided(
            record.like, record.strides, dtype=record.dtype, device=record.kept.device
        )
        self._note(self._shares.restoring, math.prod(record.like))
        return made

    def nonzero(self, record: ForeseenRecord) -> Tensor:
        """A mask of the same shape."""
        return torch.empty(record.like, dtype=torch.bool, device=record.kept.device)

    def _note(self, element_bytes: int, elements: int) -> None:
        self._works_in(Scratch(InPieces(element_bytes, self._shares.piece), elements))


class ForeseenActivations(Activations):
    """A policy's choice of tensors, with shares for what is left of them.

    Args:
        policy, model: as of `Activations`.
        shares, works_in: as of `ShareCodec`.

    Raises:
        InputError: the model has no convolution.
    """

    def __init__(
        self,
        policy: ActivationPolicy,
        model: nn.Module,
        shares: Shares,
        works_in: Callable[[Scratch], None],
    ) -> None:
        super().__init__(policy, model, Ranks())
        self.saved = SavedTensors(model, ShareCodec(shares, works_in), self._taken)

    @contextmanager
    def context(self) -> Iterator[None]:
        """Keep what is saved in here as the policy would."""
        with self.saved.context():
            yield

    def _taken(self, call: Call, tensor: Tensor) -> float | None:
        return None if self._bounded(call, tensor) is None else 1.0
