"""AdamW: PyTorch's own, in its fused form, as a method that recipes can name."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from modicum.core.contracts.ledger import Ledger, OptimizerQuery
from modicum.core.contracts.method import Against, Betas, Info, NonNegativeFloat, PositiveFloat
from modicum.core.contracts.optimizers import OptimizerMethod
from modicum.core.contracts.search import SearchChoice, SearchTable
from modicum.optim.ledger import elementwise
from modicum.optim.with_gradients import TorchStep


class AdamW(TorchStep, torch.optim.AdamW):
    """Adam with decoupled weight decay: the reference among optimizers.

    It keeps two moments of the size of the weights. Prefer it wherever these fit: it needs the
    least tuning. This is `torch.optim.AdamW` in its fused form, which needs no scratch memory.

    Args:
        lr: the learning rate of groups that name none.
        betas: (beta1, beta2), the decay of the first and the second moment.
        epsilon: is added to the root of the second moment.
        weight_decay: of groups that name none; each step takes lr weight_decay W off W.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv 1711.05101,
    algorithm 2.

    >>> from modicum.optim import AdamW
    >>> layer = torch.nn.Linear(4, 1)
    >>> optimizer = AdamW(layer.parameters(), lr=1e-2, betas=(0.9, 0.99))
    >>> layer(torch.ones(4)).sum().backward()
    >>> optimizer.step()
    >>> sorted(optimizer.state[layer.weight])
    ['exp_avg', 'exp_avg_sq', 'step']
    """

    info = Info(
        name="adamw",
        title="AdamW: Adam with decoupled weight decay",
        room="optim",
        paper="Decoupled Weight Decay Regularization, arXiv 1711.05101",
        claim="generalizes better than Adam with L2 regularization, and its learning rate and "
        "weight decay can be tuned one by one",
        traits=("exact_resume", "compiles"),
        evidence="verified against code",
        against=Against("baseline"),
        run_on_gpu=True,
        slot="optimizer",
        tiny={"weight_decay": 0.1},
    )
    keeps = "exp_avg", "exp_avg_sq"
    search = SearchTable({"betas": SearchChoice(((0.9, 0.95), (0.9, 0.999)), (0.9, 0.95))})

    def __init__(
        self,
        params: ParamsT,
        lr: PositiveFloat = 1e-3,
        *,
        betas: Betas = (0.9, 0.95),
        epsilon: PositiveFloat = 1e-8,
        weight_decay: NonNegativeFloat = 0.0,
    ) -> None:
        super().__init__(
            params, lr, betas=betas, eps=epsilon, weight_decay=weight_decay, fused=True
        )

    @staticmethod
    def spends(value: OptimizerMethod, at: OptimizerQuery) -> Ledger:
        """Two moments in the parameters' dtype; the fused step needs no more."""
        return elementwise(at, moments=2, counter=True, what="AdamW moments")
