"""A LoRA with a loss between two passes of each batch, which drop other inputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from modicum.adapters.lora import LoRA
from modicum.adapters.steps import AdapterSteps
from modicum.core.contracts.method import Info


class TwoPasses(AdapterSteps):
    """The squared difference of logits."""

    def pair_loss(self, first: Any, second: Any, batch: Any) -> Tensor:
        """The sum over a batch's rows, at its count."""
        apart = (first.float() - second.float()).square().flatten(1).mean(1)
        return batch.count * apart.mean()


class Consistent(LoRA):
    """LoRA whose outputs are to be alike whatever dropout takes."""

    info = Info(
        name="consistent",
        title="Consistent: a LoRA with a loss between two passes",
        room="adapters",
        paper="none",
        claim="none",
        traits=("adapts_base", "mergeable", "is_lora", "pairs_passes", "exact_resume", "compiles"),
        tiny={"rank": 2},
    )

    def run_hook(self, bound: Any) -> TwoPasses:
        return TwoPasses(bound)
