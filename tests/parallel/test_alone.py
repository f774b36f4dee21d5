"""A rank that replaces several pays what they owed, once, when an update is made."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modicum.comm import PowerSGD
from modicum.core.contracts.state import StateRegistry
from modicum.core.ranks.exchange import ExchangeContext
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.matrix_exchange import MatrixExchange
from modicum.core.ranks.ranks import Ranks
from modicum.parallel.alone import AloneWithMatrices

OWED = {"weight": torch.arange(12.0).view(3, 4), "unused": torch.ones(2, 4)}


class Model(nn.Module):
    """One weight that is used, and one that is not."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4, dtype=dtype))
        self.unused = nn.Parameter(torch.ones(2, 4, dtype=dtype))

    def forward(self) -> torch.Tensor:
        return 2 * self.weight.sum()


def owing(model: nn.Module) -> tuple[AloneWithMatrices, MatrixExchange]:
    """The strategy, which took up what two ranks owed, half of it each."""
    matrices = PowerSGD(rank=1).bind(ExchangeContext())
    strategy = AloneWithMatrices(Ranks(), Layout(), matrices)
    strategy.start(model)
    registry = StateRegistry()
    strategy.register(registry, model)
    view = registry.views["owed"]
    assert view.regroup is not None
    view.write(view.regroup(2 * [{name: each / 2 for name, each in OWED.items()}]))
    return strategy, matrices


def backward(strategy: AloneWithMatrices, model: nn.Module, passes: int = 1) -> None:
    for number in range(passes):
        strategy.before_backward(last=number == passes - 1)
        model().backward()
    strategy.after_backward()


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_was_owed_is_paid_once(dtype: torch.dtype, passes: int) -> None:
    model = Model(dtype)
    strategy, matrices = owing(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plain = torch.full((3, 4), 2.0 * passes)

    backward(strategy, model, passes)
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad.float(), plain + OWED["weight"])
    strategy.discard()
    optimizer.zero_grad()
    backward(strategy, model, passes)  # of an update that was not made it is owed still
    assert torch.equal(model.weight.grad.float(), plain + OWED["weight"])
    strategy.update(optimizer)
    assert torch.equal(model.weight.float(), 1 - 0.5 * (plain + OWED["weight"]))

    optimizer.zero_grad()
    backward(strategy, model, passes)
    assert torch.equal(model.weight.grad.float(), plain)
    strategy.update(optimizer)
    assert matrices.step == 2
    assert [tuple(each.shape) for each in strategy.held()] == [(2, 4)]  # nobody has used it


@pytest.mark.parametrize("passes", [1, 2])
def test_an_update_that_was_interrupted_pays_again(passes: int) -> None:
    """As when memory runs out after the backward pass, and the update is tried once more."""
    model = Model()
    strategy, _ = owing(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plain = torch.full((3, 4), 2.0 * passes)
    for _ in range(2):
        optimizer.zero_grad()
        backward(strategy, model, passes)
        assert model.weight.grad is not None
        assert torch.equal(model.weight.grad, plain + OWED["weight"])
    strategy.update(optimizer)
    assert [tuple(each.shape) for each in strategy.held()] == [(2, 4)]

    optimizer.zero_grad()
    backward(strategy, model, passes)
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, plain)


def test_an_update_that_was_interrupted_before_it_paid_again_owes_still() -> None:
    model = Model()
    strategy, matrices = owing(model)
    backward(strategy, model)
    model.zero_grad()
    strategy.before_backward(last=True)
    strategy.update(torch.optim.SGD(model.parameters()))
    assert sorted(tuple(each.shape) for each in matrices.held()) == [(2, 4), (3, 4)]


def test_who_uses_gradients_in_the_backward_pass_has_what_was_owed() -> None:
    model, seen = Model(), list[torch.Tensor]()
    strategy, _ = owing(model)

    def use_up(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        seen.append(parameter.grad)
        parameter.grad = None

    strategy.when_ready(model, use_up)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        backward(strategy, model)
        strategy.update(optimizer)
    assert torch.equal(seen[0], 2 + OWED["weight"])
    assert torch.equal(seen[1], torch.full((3, 4), 2.0))
