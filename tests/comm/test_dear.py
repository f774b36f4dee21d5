"""DeAR against PyTorch's data parallelism: the same weights and bytes, however it groups layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from modicum.comm import DeAR
from modicum.core.contracts.parameters import trainable
from modicum.core.errors import InputError
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.ranks import Ranks
from modicum.proofs.contracts.comm.subjects import NamedWeights, furthest, weights
from modicum.proofs.contracts.optim.subjects import numbers

STEPS, SMALL = 20, DeAR(layers=1)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
}


def odd() -> nn.Module:
    """Layers of sizes that no number of ranks divides, one of them frozen."""
    torch.manual_seed(0)
    frozen, last = nn.Linear(13, 13).requires_grad_(False), nn.Linear(13, 3, bias=False)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), frozen, nn.LayerNorm(13), last)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    x = numbers(5, 7, name=f"step {step}, rank {rank}")
    return (model(x) - x[:, :3].sin()).square().mean()


def with_dear(
    ranks: Ranks, method: DeAR, kind: str, clip: float | None, steps: int = STEPS
) -> tuple[NamedWeights, Any]:
    """The weights after some steps, and DeAR's strategy."""
    model = odd()
    handle = method.wrap(model, OPTIMIZERS[kind](p for _, p in trainable(model)))
    for step in range(steps):
        handle.backward(loss_of(model, step, ranks.rank))
        handle.step(clip)
    handle.flush()
    return weights(model), handle.strategy


def with_ddp(ranks: Ranks, kind: str, clip: float | None) -> NamedWeights:
    model = odd()
    optimizer = OPTIMIZERS[kind](p for _, p in trainable(model))
    replica = DistributedDataParallel(model)
    for step in range(STEPS):
        loss_of(replica, step, ranks.rank).backward()
        nn.utils.clip_grad_norm_(model.parameters(), torch.inf if clip is None else clip)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def against_ddp(ranks: Ranks, kind: str, clip: float | None) -> Any:
    ours, strategy = with_dear(ranks, SMALL, kind, clip)
    meter = strategy.collectives.meter
    return ours, furthest(ours, with_ddp(ranks, kind, clip)), dict(meter.bytes), dict(meter.calls)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("kind", "clip"), [("sgd", None), ("momentum", None), ("adamw", None), ("momentum", 0.3)]
)
def test_weights_and_bytes_are_those_of_ddp(
    pool: Pool, kind: str, clip: float | None, ranks: int
) -> None:
    # Gradients and one flag a parameter, up to a multiple of the ranks, of the trained layers.
    parts = [-(-size // ranks) for size in (7 * 13 + 13 + 2, 2 * 13 + 2, 3 * 13 + 1)]
    sent = STEPS * (ranks - 1) * 4 * sum(parts)
    norms = 0 if clip is None else STEPS  # one number of fp64 each
    results = pool.run(against_ddp, kind, clip, ranks=ranks)
    for found, distance, nbytes, calls in results:
        assert distance <= 1e-6
        assert furthest(found, results[0][0]) == 0
        assert nbytes == {"reduce_scatter": sent, "all_gather": sent + norms * 8 * (ranks - 1)}
        assert calls == {"reduce_scatter": 3 * STEPS, "all_gather": 3 * STEPS + norms}


def with_other_groups(ranks: Ranks) -> Any:
    methods = (SMALL, DeAR(layers=2), DeAR(), DeAR(tune=True))
    found = [with_dear(ranks, method, "momentum", 0.3, steps=60) for method in methods]
    tuner = found[3][1]._tuner
    groups = [len(strategy.groups) for _, strategy in found[:3]]
    return [furthest(found[0][0], other) for other, _ in found], groups, tuner.done, tuner._tried


@pytest.mark.ranks
def test_groups_of_any_size_give_the_same_weights_to_the_bit(pool: Pool) -> None:
    for far, groups, done, tried in pool.run(with_other_groups, ranks=4):
        assert (far, groups, done) == ([0, 0, 0, 0], [3, 2, 1], True)
        assert len(set(tried)) > 2


def test_sharded_weights_and_gradients_within_the_backward_are_refused() -> None:
    with pytest.raises(InputError, match=r"parallel\.strategy"):
        SMALL.strategy(Ranks(), Layout(shards=2))
    with pytest.raises(InputError, match="after the backward pass"):
        SMALL.strategy(Ranks(), Layout()).when_ready(odd(), lambda parameter: None)
    with pytest.raises(InputError, match="leave one of them out"):
        DeAR(layers=2, tune=True)
