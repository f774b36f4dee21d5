"""An exchange as the hook of DDP: what it owes is saved, loaded, and untouched by a discard."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from low_rank_loops import SHAPES, Fixed, Gradients, gradient
from pool import Pool
from torch import nn

from modicum.comm import ACPSGD, PowerSGD
from modicum.comm.base import MatrixMethod
from modicum.comm.dense_sums import DenseSums
from modicum.comm.low_rank_exchange import OWED
from modicum.core.errors import InputError
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


def of_halves(ranks: Ranks) -> str:
    """What a hook says of a model that two of four ranks share."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = groups[ranks.rank // 2]
    model = nn.parallel.DistributedDataParallel(Fixed(), process_group=own)
    with pytest.raises(InputError) as refusal:
        PowerSGD(rank=4).ddp_hook(model)
    return str(refusal.value)


@pytest.mark.ranks
def test_a_model_of_some_ranks_is_refused(pool: Pool) -> None:
    for said in pool.run(of_halves, ranks=4):
        assert "DistributedDataParallel is over some of them" in said


def unused(ranks: Ranks, method: MatrixMethod) -> list[bool]:
    """Of a matrix: whether its debt stays while nobody uses it, and is paid once somebody does."""
    model = nn.parallel.DistributedDataParallel(
        Fixed(), bucket_cap_mb=1e-3, find_unused_parameters=True
    )
    hook = method.ddp_hook(model, seed=3)
    for number in range(2):
        update(model, number, ranks.rank)
    debts = [state_of(hook)[OWED]["named.second"]]
    used = {name: gradient(name, 2, ranks.rank) for name in SHAPES}
    # By nobody; by nobody in the last pass, but before it; by rank 0 alone.
    for without in ("both", "last", "others"):
        fewer = {name: used[name] for name in used if name != "second"}
        if without == "last":
            with model.no_sync():
                model(used).backward()
        model(used if without == "others" and ranks.first else fewer).backward()
        model.zero_grad()
        debts.append(state_of(hook)[OWED]["named.second"])
    return [torch.equal(*two) for two in pairwise(debts)]


@pytest.mark.ranks
@pytest.mark.parametrize("method", METHODS[:2], ids=lambda method: method.info.name)
def test_what_is_owed_of_parameters_that_nobody_uses_stays(
    pool: Pool, method: MatrixMethod
) -> None:
    assert pool.run(unused, method) == [[True, False, False]] * 2


class NoGradient(torch.autograd.Function):
    """The sum of a tensor, which gives it no gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        """There is none."""


class Withheld(Fixed):
    """Of what it is given no gradients for, functions are computed that give none."""

    def forward(self, gradients: Gradients) -> torch.Tensor:
        left = [NoGradient.apply(self.named[name]) for name in SHAPES if name not in gradients]
        return torch.stack([super().forward(gradients), *left]).sum()


def withheld(ranks: Ranks, method: MatrixMethod) -> bool:
    """Whether the debt of a matrix stays where no rank's function gives it a gradient."""
    model = nn.parallel.DistributedDataParallel(
        Withheld(), bucket_cap_mb=1e-3, find_unused_parameters=True
    )
    hook = method.ddp_hook(model, seed=3)
    for number in range(2):
        update(model, number, ranks.rank)
    before = state_of(hook)[OWED]["named.second"]
    model({name: gradient(name, 2, ranks.rank) for name in SHAPES if name != "second"}).backward()
    return torch.equal(state_of(hook)[OWED]["named.second"], before)


@pytest.mark.ranks
@pytest.mark.parametrize("method", METHODS[:2], ids=lambda method: method.info.name)
def test_what_is_owed_of_parameters_without_a_gradient_stays(
    pool: Pool, method: MatrixMethod
) -> None:
    assert pool.run(withheld, method) == [True, True]


def let_go(ranks: Ranks) -> bool:
    """Whether an exchange, and what it owes, is gone with the DDP of a model that stays."""
    inner = Fixed()
    model = nn.parallel.DistributedDataParallel(inner)
    exchange = weakref.ref(PowerSGD(rank=4).ddp_hook(model).exchange)
    del model
    gc.collect()
    return exchange() is None


@pytest.mark.ranks
def test_a_model_keeps_no_exchange_whose_ddp_is_gone(pool: Pool) -> None:
    assert pool.run(let_go) == [True, True]


def scaled(ranks: Ranks) -> bool:
    """Whether gradients of losses with a changing scale are, over it, those without one."""
    plain, _ = hooked(PowerSGD(rank=4))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model = nn.parallel.DistributedDataParallel(Fixed(), bucket_cap_mb=1e-3)
    PowerSGD(rank=4).ddp_hook(model, seed=3, scaler=scaler)
    same = []
    for number, scale in enumerate((8.0, 8.0, 4.0, 16.0)):
        if number:
            scaler.update(scale)
        wanted = update(plain, number, ranks.rank)
        own = {name: gradient(name, number, ranks.rank) for name in SHAPES}
        scaler.scale(model(own)).backward()
        same += [
            torch.allclose(parameter.grad / scale, wanted[name], rtol=1e-4, atol=1e-5)
            for name, parameter in model.named_parameters()
        ]
        model.zero_grad()
    return all(same)


@pytest.mark.ranks
def test_what_is_owed_follows_the_scale_of_losses(pool: Pool) -> None:
    assert pool.run(scaled) == [True, True]


def of_any_order(ranks: Ranks, transposed: bool) -> float:
    """How far an update of a gradient of rank 1 is from it, of its size."""
    torch.manual_seed(0)
    layer = nn.Linear(24, 20, bias=False)
    if transposed:
        layer.weight = nn.Parameter(layer.weight.detach().T.contiguous().T)
    model = nn.parallel.DistributedDataParallel(layer)
    PowerSGD(rank=1, start_after=0).ddp_hook(model)
    left, right = torch.randn(20, 1), torch.randn(1, 24)
    for _ in range(2):
        layer.zero_grad()
        (model(torch.eye(24)).T * (left @ right)).sum().backward()
    assert layer.weight.grad is not None
    return float((layer.weight.grad - left @ right).norm() / (left @ right).norm())


@pytest.mark.ranks
@pytest.mark.parametrize("transposed", [False, True])
def test_a_weight_is_a_matrix_in_whatever_order_it_lies(pool: Pool, transposed: bool) -> None:
    assert max(pool.run(of_any_order, transposed)) < 1e-5
