"""A method that takes part in a run by every kind of hook: a term of the loss, and a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from modicum.core.contracts.ledger import Ledger
from modicum.core.contracts.method import Info, PositiveFloat
from modicum.core.contracts.run_hooks import ExtraLoss, PassKind, RunHook
from modicum.core.ranks.sharding import own_part
from modicum.optim.transform import GradientTransform, TransformContext


class Pulling(RunHook):
    """Weighs the term more with each epoch, and counts what it is called for."""

    def __init__(self, context: TransformContext, strength: float) -> None:
        assert context.parameters is not None
        self.parameters, self.strength = list(context.parameters.values()), strength
        self.ranks = context.ranks
        self.counts: dict[str, int] = {}

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def forward_context(self, kind: PassKind) -> Any:
        self._count(kind)
        return super().forward_context(kind)

    def extra_loss(self) -> ExtraLoss:
        # Each rank adds up what it holds; whoever holds the same rows as others divides by them.
        total: Tensor | float = 0.0
        for parameter in self.parameters:
            part, _ = own_part(parameter)
            holders = self.ranks.size * part.numel() / parameter.numel()
            total = total + part.float().square().sum() / holders
        assert isinstance(total, Tensor)
        strength = self.strength * (1 + self.counts.get("epochs", 0))
        return ExtraLoss(strength * self.ranks.size * total, 1.0)

    def after_optimizer(self, step: int, optimizer: object) -> None:
        self._count("updates")

    def epoch_end(self, epoch: int) -> None:
        self.counts["epochs"] = epoch

    def state_dict(self) -> dict[str, Any]:
        """What it has counted, passes apart: how many there are depends on the process."""
        return {name: self.counts.get(name, 0) for name in ("updates", "epochs")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counts = {name: int(state[name]) for name in ("updates", "epochs")}


class Pull(GradientTransform):
    """Weights are pulled towards zero by the loss.

    Args:
        strength: of half of the pull; it grows by as much with each epoch.
    """

    info = Info(
        name="pull",
        title="Pull: weights pulled towards zero by the loss",
        room="optim",
        slot="transform",
        paper="none",
        claim="smaller weights",
        traits=("exact_resume",),
    )

    strength: PositiveFloat = 1e-3

    def bind(self, context: TransformContext) -> Any:
        return Pulling(context, self.strength)

    def ledger(self, at: object) -> Ledger:
        return Ledger()
