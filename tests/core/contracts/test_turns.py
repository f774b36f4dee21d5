"""Parameters that do not take part in every update, whoever makes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

from modicum.comm import DeAR
from modicum.core.contracts.parameters import (
    ParameterMetadata,
    describe_parameter,
    metadata,
    turn_of,
)
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.ranks.ranks import Ranks
from modicum.optim import AdamW, AdamW8bit, step_in_backward
from modicum.parallel.zero import Zero

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "own": lambda p: AdamW(p, lr=0.1, weight_decay=0.1),
    "8bit": lambda p: AdamW8bit(p, lr=0.1, weight_decay=0.1),
}


def two() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))


def loss_of(model: nn.Module, step: int) -> Tensor:
    x = torch.linspace(-1, 1 + step, 6).view(2, 3)
    loss: Tensor = (model(x) - x[:, :2]).square().mean()
    return loss


def stepped(optimizer: torch.optim.Optimizer, backward: Callable[[], None]) -> None:
    """A backward pass and the step."""
    backward()
    optimizer.step()


# How a loop may give an optimizer its gradients; Lightning's backward pass is a closure.
WAYS: dict[str, Callable[[Any, Callable[[], Any]], Any]] = {
    "before": stepped,
    "closure": lambda optimizer, backward: optimizer.step(backward),
    "named closure": lambda optimizer, backward: optimizer.step(closure=backward),
}


def trained(
    kind: str, idle: Callable[[int], bool], way: str = "before"
) -> list[tuple[Tensor, dict[str, Any]]]:
    """The second layer's weight, and its state, after each of some updates."""
    model, found = two(), []
    optimizer, weight = OPTIMIZERS[kind](model.parameters()), model[1].weight
    turn = turn_of(weight)
    for step in range(5):
        turn.idle = idle(step)
        WAYS[way](optimizer, lambda step=step: loss_of(model, step).backward())
        optimizer.zero_grad()
        state = {k: v.clone() for k, v in optimizer.state[weight].items() if torch.is_tensor(v)}
        found.append((weight.detach().clone(), state))
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_where_it_is_idle_neither_it_nor_its_state_moves(kind: str, way: str) -> None:
    found = trained(kind, lambda step: step in (2, 3), way)
    assert not torch.equal(found[1][0], found[0][0])
    for value, state in found[2:4]:
        assert torch.equal(value, found[1][0])
        assert all(torch.equal(tensor, found[1][1][key]) for key, tensor in state.items())
    assert not torch.equal(found[4][0], found[3][0])


def test_where_it_is_never_idle_a_turn_changes_nothing() -> None:
    model = two()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for step in range(5):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(trained("adamw", lambda step: False)[-1][0], model[1].weight)


def test_a_turn_is_shared_by_what_gets_memory_and_by_masters() -> None:
    with on_meta():
        model = nn.Linear(3, 3)
    describe_parameter(model.weight, ParameterMetadata(3.0))
    turn = turn_of(model.weight)
    materialise(model, "cpu")
    assert turn_of(model.weight) is turn
    assert metadata(model.weight).learning_rate_multiplier == 3.0
    strategy = Zero(Ranks())
    strategy.start(model)
    assert turn_of(dict(strategy.trained(model))["weight"]) is turn


def test_in_the_backward_pass_it_is_left_out() -> None:
    model, expected = two(), trained("adamw", lambda step: step == 1)
    turn = turn_of(model[1].weight)
    stop = step_in_backward(OPTIMIZERS["adamw"](model.parameters()))
    for step in range(5):
        turn.idle = step == 1
        loss_of(model, step).backward()
        assert model[1].weight.grad is None
        assert torch.equal(model[1].weight, expected[step][0])
    stop()


def deferred(ranks: Ranks) -> list[float]:
    model = two()
    handle = DeAR(layers=1).wrap(model, OPTIMIZERS["adamw"](model.parameters()))
    turn = turn_of(model[1].weight)
    for step in range(5):
        turn.idle = step in (1, 3)  # while the update before this one is not made yet
        handle.backward(loss_of(model, step))
        handle.step()
    handle.flush()
    return model[1].weight.flatten().tolist()


@pytest.mark.ranks
def test_a_deferred_update_leaves_out_what_was_idle_then(pool: Pool) -> None:
    expected = trained("adamw", lambda step: step in (1, 3))[-1][0].flatten().tolist()
    for found in pool.run(deferred, ranks=2):
        assert found == pytest.approx(expected, rel=1e-5)
