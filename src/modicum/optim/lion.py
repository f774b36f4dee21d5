"""Lion: the sign of an interpolated momentum, with one moment of state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from modicum.core.contracts.ledger import Entry, Ledger, OptimizerQuery
from modicum.core.contracts.method import Against, Betas, Info, NonNegativeFloat, PositiveFloat
from modicum.core.contracts.optimizers import OptimizerMethod
from modicum.core.contracts.search import LogRange, SearchChoice, SearchTable
from modicum.core.ranks.sharding import own_part
from modicum.optim.copies import CopiedOptimizer
from modicum.optim.kept import StateShape
from modicum.optim.ledger import elementwise, local_elements
from modicum.optim.row_steps import wide
from modicum.optim.with_gradients import with_gradients


class Lion(CopiedOptimizer):
    """Evolved sign momentum: every element moves by the learning rate, up or down.

    With a moment M, W loses lr sign(b1 M + (1 - b1) G), and then M <- b2 M + (1 - b2) G. State is
    one moment in the weights' dtype, half of AdamW's. Arithmetic is fp32, or fp64
    where weights are.

    Prefer it to AdamW where half of the state matters, and tune both: Lion's learning rate is 3 to
    10 times smaller and its weight decay as much larger, so that their product stays. Small batches
    suit it less, as the sign of a noisy gradient is noise of full size.

    Args:
        lr: the learning rate of groups that name none.
        betas: (b1, b2): the weights of the moment in the update, and in the moment itself.
        weight_decay: of groups that name none; each step takes lr weight_decay W off W, before the
            update.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675,
    algorithm 2.

    >>> from modicum.optim import Lion
    >>> layer = torch.nn.Linear(4, 1)
    >>> optimizer = Lion(layer.parameters(), lr=0.5)
    >>> before = layer.weight.detach().clone()
    >>> layer(torch.tensor([1.0, 2.0, -3.0, 0.0])).sum().backward()
    >>> optimizer.step()
    >>> (before - layer.weight.detach()).tolist(), list(optimizer.state[layer.weight])
    ([[0.5, 0.5, -0.5, 0.0]], ['exp_avg'])
    """

    info = Info(
        name="lion",
        title="Lion: the sign of an interpolated momentum",
        room="optim",
        paper="Symbolic Discovery of Optimization Algorithms, arXiv 2302.06675; compared in "
        "arXiv 2509.02046",
        claim="half of AdamW's state; as much data as AdamW needs, within a few percent, both "
        "tuned alike",
        traits=("exact_resume", "compiles"),
        evidence="verified against code",
        claim_verdict="holds",
        against=Against("equal", "AdamW, tuned alike"),
        reason="half of AdamW's moments to the byte; its data speed-up is 0.96, in a 95 % interval "
        "of 0.91 to 1.02, where matrices have a quarter of the rate; at one rate for all weights "
        "it was 0.40",
        run_on_gpu=True,
        slot="optimizer",
        tiny={"weight_decay": 0.1},
    )
    search = SearchTable(
        {
            "learning_rate": LogRange(1e-5, 1e-2, 1e-4),
            "betas": SearchChoice(((0.9, 0.95), (0.9, 0.99), (0.95, 0.98)), (0.9, 0.99)),
        }
    )

    def __init__(
        self,
        params: ParamsT,
        lr: PositiveFloat = 1e-4,
        *,
        betas: Betas = (0.9, 0.99),
        weight_decay: NonNegativeFloat = 0.0,
    ) -> None:
        self.method = self.value(betas=betas, weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Raises:
            InputError: a gradient is sparse, or a parameter complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter, group in with_gradients(self.param_groups):
            self._update(parameter, group)
        return loss

    def _update(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        """Update this rank's part of a parameter and of its moment."""
        state, (first, second), rate = self.state[parameter], group["betas"], group["lr"]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        weight, gradient = own_part(parameter)[0], wide(own_part(parameter.grad)[0])
        kept = own_part(state["exp_avg"])[0]
        moment, new = wide(kept), wide(weight)
        update = torch.mul(moment, first).add_(gradient, alpha=1 - first).sign_()
        if group["weight_decay"]:
            new.mul_(1 - rate * group["weight_decay"])
        new.sub_(update, alpha=rate)
        moment.mul_(second).add_(gradient, alpha=1 - second)
        for tensor, found in ((weight, new), (kept, moment)):
            if found is not tensor:
                tensor.copy_(found)

    def _kept(self, parameter: Tensor) -> dict[str, StateShape]:
        return {"exp_avg": (tuple(parameter.shape), parameter.dtype)}

    @staticmethod
    def spends(value: OptimizerMethod, at: OptimizerQuery) -> Ledger:
        """One moment in the parameters' dtype; in a step an update, and copies of what is bf16."""
        copies = (
            local_elements(p, 0, at.shards) * (16 if p.element_bytes < 4 else p.element_bytes)
            for p in at.parameters
        )
        ledger = elementwise(at, moments=1, counter=False, what="Lion's moment")
        return ledger + Ledger.of(
            Entry("workspace", max(copies, default=0), ("step",), "of one parameter's update")
        )
