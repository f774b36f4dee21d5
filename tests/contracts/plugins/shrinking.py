"""A method that changes shapes: low-rank layers lose their weakest component at some steps."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import nn

from modicum.core.contracts.ledger import Ledger, OptimizerQuery
from modicum.core.contracts.method import Info, Method, PositiveInt
from modicum.core.contracts.run_hooks import RunHook
from modicum.core.contracts.step import StepContext, StepProgram
from modicum.core.contracts.surgery import Surgery
from modicum.core.ranks.sharding import whole
from modicum.linears import LowRankLinear, rank_surgery
from modicum.optim import AdamW


class ShrinkingLayers(RunHook):
    """Looks at the sizes of components when their step has come."""

    def __init__(self, model: nn.Module, steps: tuple[int, ...]) -> None:
        self.model, self.steps = model, steps

    def surgery(self, step: int) -> Surgery | None:
        if step not in self.steps:
            return None
        kept = {
            name: strongest(layer, layer.rank - 1)
            for name, layer in self.model.named_modules()
            if isinstance(layer, LowRankLinear) and layer.rank > 1
        }
        return rank_surgery(kept, f"drops a rank of {len(kept)} layers")


def strongest(layer: LowRankLinear, count: int) -> tuple[int, ...]:
    """The `count` components whose product is largest, in their order."""
    down, up = whole(layer.down.detach()).double(), whole(layer.up.detach()).double()
    sizes = down.norm(dim=1) * up.norm(dim=0)
    return tuple(sorted(sizes.argsort(descending=True, stable=True)[:count].tolist()))


class Shrinking(Method):
    """AdamW; low-rank layers lose a rank at each of some steps.

    Args:
        steps: after which updates.
    """

    info = Info(
        name="shrinking",
        title="Shrinking: low-rank layers lose ranks while they are trained",
        room="optim",
        slot="optimizer",
        paper="none",
        claim="smaller layers",
        traits=("changes_shapes", "exact_resume"),
    )

    steps: Annotated[tuple[PositiveInt, ...], Field(strict=False)] = (5,)

    def bind_step(self, context: StepContext) -> StepProgram:
        context.hooks.add("shrinking", ShrinkingLayers(context.model, self.steps))
        return AdamW.value().bind_step(context)

    def ledger(self, at: OptimizerQuery) -> Ledger:
        return AdamW.value().ledger(at)
