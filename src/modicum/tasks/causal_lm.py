"""The task of predicting the next token: its loss, by modicum's one loss convention.

A rank returns the *sum* of its losses and the *count* of what it summed over. Whoever scales by
the global count gets gradients that add up over micro-batches and ranks of any size; means of
means are silently wrong as soon as counts differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from modicum.data.batch import Batch
from modicum.models.llama import Llama


@dataclass(frozen=True)
class CausalLM:
    """Cross-entropy of the next token, in nats."""

    def loss_sum(self, model: Llama, batch: Batch) -> Tensor:
        """The sum, over the batch's trained tokens, of -log p(label): fp32, one element.

        `batch.trained_tokens` is the count that belongs to it.
        """
        logits = model(batch.input_ids, batch.documents)
        return F.cross_entropy(
            logits.flatten(0, 1).float(), batch.labels.flatten(), ignore_index=-100, reduction="sum"
        )

    @torch.no_grad()
    def evaluate(self, model: Llama, batch: Batch) -> tuple[float, int]:
        """The sum as a number, and the count."""
        return float(self.loss_sum(model, batch)), batch.trained_tokens
