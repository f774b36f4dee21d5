from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from modicum.core.contracts.parameters import optimizer_groups
from modicum.core.contracts.strategy import Strategy
from modicum.data.batch import Batch
from modicum.models.config import ModelConfig
from modicum.models.llama import Llama, create
from modicum.tasks import CausalLM
from modicum.trainer.events import Events
from modicum.trainer.step import StandardStep


def model() -> Llama:
    config = ModelConfig(vocabulary_size=40, width=16, layers=2, heads=2, context=12)
    return create(config, 0, torch.device("cpu"), torch.float32)


def batch(rows: int = 6) -> Batch:
    """Rows in which very different numbers of tokens are trained."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 40, (rows, 13), generator=generator)
    labels = tokens[:, 1:].clone()
    for row in range(rows):
        labels[row, : 2 * row] = -100
    return Batch(tokens[:, :-1], labels)


def program(net: Llama, clip_norm: float | None = None, rate: float = 0.1) -> StandardStep:
    groups = optimizer_groups(net, learning_rate=rate, weight_decay=0.0)
    optimizer = torch.optim.SGD(groups)
    return StandardStep(CausalLM(), net, optimizer, Strategy(), Events(), "fp32", clip_norm)


def update(step: StandardStep, batches: list[Batch], check: Callable[[], None] = lambda: None):
    return step(7, batches, sum(each.count for each in batches), check)


def weights(net: Llama) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_micro_batches_of_unequal_counts_equal_the_whole(size):
    whole, parts = model(), model()
    one = update(program(whole), [batch()])
    two = update(program(parts), batch().split(size))
    assert two.tokens == one.tokens == 12 + 10 + 8 + 6 + 4 + 2
    assert two.loss == pytest.approx(one.loss, abs=1e-6)
    assert two.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-5)
    assert torch.allclose(weights(whole), weights(parts), atol=1e-6, rtol=0)


def test_the_loss_is_the_mean_over_trained_tokens():
    net = model()
    data = batch()
    logits = net(data.input_ids, None).detach()
    picked = torch.log_softmax(logits, -1).gather(-1, data.labels.clamp(min=0)[..., None])[..., 0]
    expected = -picked[data.labels != -100].mean()
    assert update(program(net), data.split(2)).loss == pytest.approx(float(expected), abs=1e-6)


def test_clipping_scales_all_gradients_together():
    free, bound = model(), model()
    start = weights(free)
    norm = update(program(free), [batch()]).gradient_norm
    outcome = update(program(bound, clip_norm=norm / 4), [batch()])
    assert outcome.gradient_norm == pytest.approx(norm)  # as it was before clipping
    assert torch.allclose(weights(bound) - start, (weights(free) - start) / 4, atol=1e-7)
    untouched = model()
    update(program(untouched, clip_norm=norm * 2), [batch()])
    assert torch.equal(weights(untouched), weights(free))


class Broken(CausalLM):
    def loss_sum(self, model, batch):
        return super().loss_sum(model, batch) * torch.nan


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_is_skipped_and_leaves_no_trace(where):
    net = model()
    before, calls = weights(net), []
    step = program(net)
    for event in ("before_optimizer", "after_optimizer", "gradients_ready"):
        step.events.on(event, lambda step, event=event: calls.append(event))
    if where == "loss":
        step.task = Broken()
    else:
        next(net.parameters()).register_hook(lambda gradient: gradient * torch.inf)
    outcome = update(step, batch().split(3))
    assert outcome.skipped
    assert torch.equal(weights(net), before)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert calls == ["gradients_ready"]
    assert step.optimizer.state == {}


def test_a_request_to_stop_between_micro_batches_leaves_no_gradients():
    net, calls = model(), []
    before = weights(net)

    def stop() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        update(program(net), batch().split(2), stop)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert torch.equal(weights(net), before)


def test_events_come_in_order():
    step, seen = program(model()), []
    names = ["before_update", "gradients_ready", "before_optimizer", "after_optimizer"]
    for name in names:
        step.events.on(name, lambda step, name=name: seen.append((name, step)))
    update(step, batch().split(3))
    assert seen == [(name, 7) for name in names]
