from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from modicum.core.contracts.strategy import Strategy
from modicum.proofs.bench.training import RateSchedule, train


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (RateSchedule(last=1.0), [1.0] * 4),
        (RateSchedule(), [1.0, 0.75, 0.5, 0.25]),
        (RateSchedule(0.5), [0.5, 0.75, 0.5, 0.25]),
        (RateSchedule(2, delayed=True), [0.5, 1.0, 1.0, 0.5]),
        (RateSchedule(shape="cosine", last=0.5), [1.0, 0.5 + 0.25 * (1 + 0.5**0.5), 0.75, None]),
    ],
)
def test_a_schedule_rises_on_a_line_and_comes_down(
    schedule: RateSchedule, expected: list[float | None]
) -> None:
    for step, value in enumerate(expected):
        if value is not None:
            assert schedule(step, 4) == pytest.approx(value, abs=0.08 if step == 1 else 1e-9)
    assert all(0 < schedule(step, 1000) <= 1 for step in range(1000))


def test_updates_are_those_of_a_plain_loop() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
    theirs.load_state_dict(ours.state_dict())
    inputs = torch.randn(5, 4, 3)
    seen: list[tuple[str, int]] = []
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.5)
    seconds = train(
        [optimizer],
        lambda step: ours(inputs[step]).square().sum(),
        5,
        schedule=RateSchedule(2),
        clip=0.7,
        before_update=lambda step: seen.append(("before", step)),
        after_update=lambda step: seen.append(("after", step)) or step == 3,
    )
    plain = torch.optim.SGD(theirs.parameters(), lr=0.5)
    for step in range(4):
        plain.param_groups[0]["lr"] = 0.5 * min(1.0, (step + 1) / 2) * (1 - step / 5)
        theirs(inputs[step]).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.7)
        assert norm > 0.7
        plain.step()
        plain.zero_grad()
    assert len(seconds) == 4
    assert seen == [(when, step) for step in range(4) for when in ("before", "after")]
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.grad is None


def test_optimizers_that_change_on_the_way_and_rates_of_groups_are_kept() -> None:
    a, b = (nn.Parameter(torch.ones(1)) for _ in range(2))
    groups = [{"params": [a], "lr": 1.0, "base_learning_rate": 0.25}, {"params": [b], "lr": 0.5}]
    optimizers = [torch.optim.SGD(groups, lr=1.0)]

    def swap(step: int) -> None:
        if step == 1:
            optimizers[0] = torch.optim.SGD([a], lr=0.0)

    train(optimizers, lambda step: a.sum() + b.sum(), 2, schedule=RateSchedule(last=1.0),
          before_update=swap)  # fmt: skip
    assert (a.item(), b.item()) == (0.75, 0.5)
    assert b.grad is not None  # of the update in which nobody stepped it


def test_a_strategy_hears_of_every_update() -> None:
    class Noting(Strategy):
        def __init__(self) -> None:
            super().__init__()
            self.heard: list[str] = []

        def before_backward(self, *, last: bool) -> None:
            self.heard.append(f"before {last}")

        def after_backward(self) -> None:
            self.heard.append("after")

        def update(self, optimizer: torch.optim.Optimizer) -> None:
            self.heard.append("update")

    strategy, weight = Noting(), nn.Parameter(torch.ones(2))
    loss = lambda step: weight.square().sum() * math.pi  # noqa: E731
    train([torch.optim.SGD([weight], lr=1.0)], loss, 2, strategy=strategy)
    assert strategy.heard == ["before True", "after", "update"] * 2
    assert torch.equal(weight, torch.ones(2))
