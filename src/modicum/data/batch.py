"""What a model is fed: token ids, the targets of their predictions, and who belongs to whom."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T", bound=Tensor | None)
IGNORED = -100  # a label that is not trained; the default `ignore_index` of cross entropy


@dataclass(frozen=True)
class LabelledRows:
    """Tensors that have a row for each example, `labels` among them; some may be None.

    A subclass is a frozen dataclass whose fields are these tensors, and nothing else.
    """

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self._labels)

    @property
    def count(self) -> int:
        """How many labels are trained; on an accelerator, asking waits for it."""
        return int((self._labels != IGNORED).sum())

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self._labels.device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """The same batch on `device`."""
        parts = self._parts().items()
        return replace(self, **{k: part.to(device, non_blocking=non_blocking) for k, part in parts})

    def split(self, micro_batch_size: int) -> list[Self]:
        """Views of `micro_batch_size` rows each, in order; the last may have fewer."""
        parts = {name: part.split(micro_batch_size) for name, part in self._parts().items()}
        numbers = range(len(parts["labels"]))
        return [replace(self, **{k: part[i] for k, part in parts.items()}) for i in numbers]

    def idle(self) -> Self:
        """The first row, in which nothing is trained."""
        first = {name: part[:1] for name, part in self._parts().items()}
        return replace(self, **first | {"labels": torch.full_like(first["labels"], IGNORED)})

    def twice(self) -> Self:
        """The rows, and after them the same again: for two passes at once."""
        return replace(self, **{name: twice(part) for name, part in self._parts().items()})

    @property
    def _labels(self) -> Tensor:
        return self._parts()["labels"]

    def _parts(self) -> dict[str, Tensor]:
        """The tensors that are there, by name."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: part for name, part in found.items() if part is not None}


@dataclass(frozen=True)
class Batch(LabelledRows):
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


def twice(tensor: T) -> T:
    """A tensor's rows, and after them the same again; None stays None.

    >>> twice(torch.tensor([1, 2])).tolist()
    [1, 2, 1, 2]
    """
    return tensor if tensor is None else cast(T, torch.cat([tensor, tensor]))
