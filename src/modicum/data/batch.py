"""What a model is fed: token ids, the targets of their predictions, and who belongs to whom."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T", bound=Tensor | None)
IGNORED = -100  # a label that is not trained; the default `ignore_index` of cross entropy


@dataclass(frozen=True)
class Batch:
    """Rows of tokens with their targets.

    Args:
        input_ids: int64 [B, T].
        labels: int64 [B, T], already shifted: `labels[b, t]` is the target of the prediction made
            at position t, or -100 where none is trained.
        documents: int32 [B, T], the number within its row of the document that a token belongs to
            (0, 1, 2, …; padding has a number of its own), or None when no row holds more than one
            document, so that plain causal attention is right. Attention never crosses documents.

    >>> batch = Batch(torch.tensor([[5, 6, 7]]), torch.tensor([[6, 7, -100]]))
    >>> batch.count
    2
    """

    input_ids: Tensor
    labels: Tensor
    documents: Tensor | None = None

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.labels)

    @property
    def count(self) -> int:
        """How many labels are trained; on an accelerator, asking waits for it."""
        return int((self.labels != IGNORED).sum())

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.input_ids.device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on `device`."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        documents = None if self.documents is None else move(self.documents)
        return Batch(move(self.input_ids), move(self.labels), documents)

    def split(self, micro_batch_size: int) -> list[Batch]:
        """Views of `micro_batch_size` rows each, in order; the last may have fewer."""
        inputs = self.input_ids.split(micro_batch_size)
        labels = self.labels.split(micro_batch_size)
        if self.documents is None:
            return [Batch(*parts) for parts in zip(inputs, labels, strict=True)]
        documents = self.documents.split(micro_batch_size)
        return [Batch(*parts) for parts in zip(inputs, labels, documents, strict=True)]

    def idle(self) -> Batch:
        """The first row, in which nothing is trained."""
        first = self.split(1)[0]
        return replace(first, labels=torch.full_like(first.labels, IGNORED))

    def twice(self) -> Batch:
        """The rows, and after them the same again: for two passes at once."""
        return Batch(twice(self.input_ids), twice(self.labels), twice(self.documents))


def twice(tensor: T) -> T:
    """A tensor's rows, and after them the same again; None stays None.

    >>> twice(torch.tensor([1, 2])).tolist()
    [1, 2, 1, 2]
    """
    return tensor if tensor is None else cast(T, torch.cat([tensor, tensor]))
