"""Steps over parts of an optimizer's parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modicum.core.contracts.stepping import Stepper


def two(**fields: float) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    parameters = [nn.Parameter(torch.full((3,), float(number))) for number in (1, 2)]
    groups = [{"params": [parameter]} for parameter in parameters]
    return parameters, torch.optim.AdamW(groups, lr=0.1, **fields)


def gradients(parameters: list[nn.Parameter], step: int) -> None:
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.linspace(-1, 1 + number, 3) * (1 + step)


def test_parts_one_after_the_other_are_the_whole() -> None:
    (whole, optimizer), (parts, other) = two(weight_decay=0.1), two(weight_decay=0.1)
    stepper = Stepper(other)
    for step in range(4):
        gradients(whole, step)
        gradients(parts, step)
        optimizer.step()
        stepper.step(parts[1:])
        stepper.step(parts[:1])
    for one, two_ in zip(whole, parts, strict=True):
        assert torch.equal(one, two_)
    groups = other.param_groups
    assert [len(group["params"]) for group in groups] == [1, 1]


def test_a_step_that_was_put_off_keeps_its_settings() -> None:
    (now, optimizer), (later, other) = two(), two()
    stepper = Stepper(other)
    gradients(now, 0)
    gradients(later, 0)
    optimizer.step()
    settings = stepper.settings()
    for group in other.param_groups:
        group["lr"] = 7.0
    stepper.step(later, settings)
    for one, two_ in zip(now, later, strict=True):
        assert torch.equal(one, two_)
    assert other.param_groups[0]["lr"] == 7.0


def test_settings_that_are_tensors_do_not_follow_the_groups() -> None:
    _, optimizer = two()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    optimizer.param_groups[0]["betas"] = (torch.tensor(0.9), 0.999)
    kept = Stepper(optimizer).settings()[0]
    optimizer.param_groups[0]["lr"].fill_(7.0)
    optimizer.param_groups[0]["betas"][0].fill_(0.0)
    assert float(kept["lr"]) == pytest.approx(0.1)
    assert float(kept["betas"][0]) == pytest.approx(0.9)


def test_strangers_are_passed_over_and_groups_stay_after_an_error() -> None:
    parameters, optimizer = two()
    stepper = Stepper(optimizer)
    stranger = nn.Parameter(torch.ones(3))
    stranger.grad = torch.ones(3)
    stepper.step([stranger])
    assert torch.equal(stranger, torch.ones(3))
    groups = optimizer.param_groups
    parameters[0].grad = torch.ones(3)
    optimizer.state[parameters[0]]["exp_avg"] = None
    with pytest.raises(KeyError):
        stepper.step(parameters)
    assert optimizer.param_groups is groups
