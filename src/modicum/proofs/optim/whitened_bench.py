"""What proofs of optimizers with square factors share: the cost of a step, the data it saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from modicum.core.contracts.ledger import OptimizerQuery, TrainedParameter
from modicum.core.contracts.optimizers import OptimizerMethod
from modicum.core.random import normal_
from modicum.proofs.base import ProofRun
from modicum.proofs.bench.meters import in_turns
from modicum.proofs.optim.data_speed_up import (
    ADAMW,
    ADAMW_RATES,
    AgainstAdamW,
    TunedArm,
)
from modicum.proofs.optim.text_bench import Plain

SIDE = 256  # of the matrix whose steps are timed
_STEPS = 10  # at a time: one refresh of what has one in ten


def drawn(*shape: int, name: str) -> Tensor:
    """Standard normal numbers by a name, some of whose rows are larger than others, in fp32."""
    sizes = torch.linspace(0.2, 2.0, shape[0])[:, None]
    return normal_(torch.empty(shape), seed=0, name=name) * sizes


def costs(run: ProofRun, tried: Mapping[str, OptimizerMethod]) -> None:
    """Milliseconds of a step of a square matrix, and bytes of moments and factors, over AdamW's.

    They have no bar: what a decomposition costs is the processor's.
    """
    shape = TrainedParameter("weight", (SIDE, SIDE), "matrix", 4)
    both = {"AdamW": ADAMW, **tried}
    times = in_turns({name: _stepping(value) for name, value in both.items()}, 3)
    for name, value in tried.items():
        run.figure(
            f"milliseconds of a step of {SIDE} x {SIDE}, {name}",
            method=1e3 * times[name].median / _STEPS,
            baseline=1e3 * times["AdamW"].median / _STEPS,
        )
        kept, adam = (
            each.ledger(OptimizerQuery((shape,))).bytes("optimizer") for each in (value, ADAMW)
        )
        run.figure(f"bytes of state of {SIDE} x {SIDE}, {name}", method=kept, baseline=adam)


def _stepping(value: OptimizerMethod) -> Callable[[], None]:
    """Some steps of the matrix by an optimizer, with a gradient that stays."""
    weight = nn.Parameter(torch.zeros(SIDE, SIDE))
    weight.grad = drawn(SIDE, SIDE, name="gradient")
    optimizer = value.bind([{"params": [weight], "lr": 1e-3, "weight_decay": 0.0}])

    def steps() -> None:
        for _ in range(_STEPS):
            optimizer.step()

    return steps


def less_data(
    run: ProofRun, name: str, arms: Sequence[TunedArm], *, claimed: str, alike: str
) -> None:
    """The data speed-up of the best of these arms over AdamW, and the loss at the same tokens.

    Args:
        alike: what the method is called in the name of its null.
    """
    bench = AgainstAdamW(run)
    null: Sequence[TunedArm] = [("AdamW", Plain(ADAMW), ADAMW_RATES)]
    chosen = run.contender(arms, null=null, null_is=f"AdamW in {alike} place")
    found = bench.speed_up(name, chosen, claimed=claimed)
    run.at_least(
        "lower end of the 95 % interval of the data speed-up over AdamW",
        found.lower,
        1.01,
        seeds=found.each,
    )
    run.against("AdamW, tuned alike", "held-out loss at equal tokens", found.losses)
