"""An exchange as the hook of DDP: what it owes is saved, loaded, and untouched by a discard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from low_rank_loops import SHAPES, Fixed, Gradients, gradient
from pool import Pool
from torch import nn

from modicum.comm import ACPSGD, PowerSGD
from modicum.comm.base import MatrixMethod
from modicum.comm.dense_sums import DenseSums
from modicum.core.ranks.ddp_hook import DDPHook
from modicum.core.ranks.ranks import Ranks

METHODS = [ACPSGD(rank=4), PowerSGD(rank=4), DenseSums(dtype="bf16")]
each_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.info.name)


def hooked(method: MatrixMethod) -> tuple[nn.Module, DDPHook]:
    model = nn.parallel.DistributedDataParallel(Fixed(), bucket_cap_mb=1e-3)
    return model, method.ddp_hook(model, seed=3)


def update(model: nn.Module, number: int, rank: int) -> Gradients:
    """The means of an update's gradients."""
    model({name: gradient(name, number, rank) for name in SHAPES}).backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def state_of(hook: DDPHook) -> dict[str, Any]:
    """Copies of all that the exchange remembers."""
    hook.settle()
    return {
        view.name: {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in view.read().items()
        }
        for view in hook.exchange.views()
    }


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name])
        if isinstance(value, torch.Tensor)
        else equal(value, other[name])
        if isinstance(value, dict)
        else value == other[name]
        for name, value in one.items()
    )


def resumed(ranks: Ranks, method: MatrixMethod) -> list[bool]:
    """Whether three updates, saved, and two more by another hook are five by one."""
    model, hook = hooked(method)
    for number in range(3):
        update(model, number, ranks.rank)
    saved = state_of(hook)
    again, other = hooked(method)
    for view in other.exchange.views():
        view.write(saved[view.name])
    other.exchange.step = hook.exchange.step
    return [
        equal(update(model, number, ranks.rank), update(again, number, ranks.rank))
        for number in (3, 4)
    ] + [equal(state_of(hook), state_of(other))]


@pytest.mark.ranks
@each_method
def test_a_hook_resumes_to_the_bit(pool: Pool, method: MatrixMethod) -> None:
    assert pool.run(resumed, method) == [[True] * 3] * 2


def discarded(ranks: Ranks, method: MatrixMethod) -> tuple[bool, bool, int]:
    """An update that is not made: whether state is as before it, and the next as if it never was.

    And how many updates count.
    """
    (model, hook), (calm, other) = hooked(method), hooked(method)
    for number in range(3):
        update(model, number, ranks.rank)
        update(calm, number, ranks.rank)
    before = state_of(hook)
    update(model, 50, ranks.rank)
    hook.discard()
    untouched = equal(state_of(hook), before)
    same = equal(update(model, 3, ranks.rank), update(calm, 3, ranks.rank))
    hook.settle()
    other.settle()
    return untouched, same, hook.exchange.step


@pytest.mark.ranks
@each_method
def test_a_discarded_update_leaves_no_trace(pool: Pool, method: MatrixMethod) -> None:
    assert pool.run(discarded, method) == [(True, True, 4)] * 2
