from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from modicum.core.contracts.parameters import optimizer_groups
from modicum.core.contracts.run_hooks import ExtraLoss, RunHook
from modicum.core.contracts.step import InBackwardStep, StandardStep, StepContext
from modicum.core.errors import InputError
from modicum.data.batch import Batch
from modicum.models.config import ModelConfig
from modicum.models.llama import Llama, create
from modicum.tasks import CausalLM


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
    def groups(weight_decay: float):
        return optimizer_groups(net, learning_rate=rate, weight_decay=weight_decay)

    context = StepContext(net, task=CausalLM(), groups=groups, clip_norm=clip_norm)
    return StandardStep(context, torch.optim.SGD(groups(0.0)))


def test_layers_with_sparse_gradients_are_refused_before_the_first_update():
    net = model()
    net.model.embed_tokens.sparse = True
    with pytest.raises(InputError, match=r"layer model.embed_tokens gives sparse .*sparse=False"):
        program(net)
    net.model.embed_tokens.weight.requires_grad_(False)
    update(program(net), [batch()])


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
    def loss_of(self, outputs, batch):
        return super().loss_of(outputs, batch) * torch.nan


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_is_skipped_and_leaves_no_trace(where):
    net = model()
    before, calls = weights(net), []
    step = program(net)
    step.hooks.add("notes", Notes(calls))
    if where == "loss":
        step.task = Broken()
    else:
        next(net.parameters()).register_hook(lambda gradient: gradient * torch.inf)
    outcome = update(step, batch().split(3))
    assert outcome.skipped
    assert torch.equal(weights(net), before)
    assert all(parameter.grad is None for parameter in net.parameters())
    members = [call[0] for call in calls]
    assert members == [
        "before_update",
        *["enter", "leave"] * len(batch().split(3)),
        "update_loss",
        "after_backward",
    ]
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


class Notes(RunHook):
    """Notes each member that is called, and what is there then."""

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self.calls = calls

    def before_update(self, step):
        self.calls.append(("before_update", step))

    @contextmanager
    def forward_context(self, kind):
        self.calls.append(("enter", kind))
        try:
            yield
        finally:  # a recomputed pass is left as soon as it has what is needed
            self.calls.append(("leave", kind))

    def update_loss(self, loss):
        self.calls.append(("update_loss", loss))

    def after_backward(self):
        self.calls.append(("after_backward",))

    def before_optimizer(self, step):
        self.calls.append(("before_optimizer", step))

    def after_optimizer(self, step, optimizer):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        self.calls.append(("after_optimizer", step, all(g is not None for g in gradients)))


def test_hooks_are_called_in_order_and_gradients_are_there_to_the_end():
    step, calls = program(model()), []
    step.hooks.add("notes", Notes(calls))
    outcome = update(step, batch().split(3))
    assert calls == [
        ("before_update", 7),
        *[("enter", "train"), ("leave", "train")] * len(batch().split(3)),
        ("update_loss", outcome.loss),
        ("after_backward",),
        ("before_optimizer", 7),
        ("after_optimizer", 7, True),
    ]
    calls.clear()
    step.rehearse(batch(), 40)
    assert calls == [("enter", "rehearse"), ("leave", "rehearse")]


@pytest.mark.parametrize("kind", ["train", "rehearse"])
def test_a_pass_that_runs_again_is_told_so(kind):
    net, calls = model(), []
    net.recompute = True
    step = program(net)
    step.hooks.add("notes", Notes(calls))
    step.loss(batch(), 40, kind).backward()
    again = "recompute" if kind == "train" else "rehearse"
    each = [("enter", again), ("leave", again)]
    assert calls == [("enter", kind), ("leave", kind), *each * len(list(net.blocks))]


class OutOfMemory(RunHook):
    """Has no memory for the gradients."""

    def after_backward(self):
        raise MemoryError


class LearningOutOfMemory(OutOfMemory):
    """The same, with a state."""

    def load_state_dict(self, state):
        self.state = state


@pytest.mark.parametrize(("hook", "half"), [(OutOfMemory, False), (LearningOutOfMemory, True)])
def test_an_update_is_half_made_once_a_state_may_have_changed(hook, half):
    step = program(model())
    step.hooks.add("hook", hook())
    with pytest.raises(MemoryError):
        update(step, [batch()])
    assert step.updating is half


class WhenNew(RunHook):
    """Notes whether an update is half made when weights are new."""

    def __init__(self, program: StandardStep) -> None:
        self.program, self.seen = program, []

    def after_optimizer(self, step, optimizer):
        self.seen.append(self.program.updating)


@pytest.mark.parametrize("kind", [StandardStep, InBackwardStep])
def test_an_update_is_half_made_until_the_last_hook_has_seen_it(kind):
    plain = program(model())
    step = kind(plain.context, plain.optimizer)
    step.hooks.add("notes", notes := WhenNew(step))
    update(step, [batch()])
    assert (notes.seen, step.updating) == ([True], False)


class Decay(RunHook):
    """A term of the weights, given as if several were summed, and one of as many positions."""

    def __init__(self, net, count: float) -> None:
        self.net, self.count, self.asked = net, count, 0

    def extra_loss(self):
        self.asked += 1
        total = sum(parameter.square().sum() for parameter in self.net.parameters())
        return ExtraLoss(self.count * total, self.count)


@pytest.mark.parametrize("parts", [1, 3])
def test_an_extra_loss_counts_once_an_update(parts):
    net, plain = model(), model()
    step = program(net)
    step.hooks.add("decay", decay := Decay(net, count=5.0))
    outcome = update(step, batch().split(-(-6 // parts)))
    expected = float(sum(p.detach().square().sum() for p in plain.parameters()))
    assert outcome.extra_loss == pytest.approx(expected, rel=1e-5)
    assert decay.asked == 1
    other = program(plain)
    before = weights(plain)
    assert outcome.loss == pytest.approx(update(other, [batch()]).loss, abs=1e-6)
    # The gradient of the term is twice the weights; the optimizer is plain SGD at 0.1.
    assert torch.allclose(weights(net), weights(plain) - 0.2 * before, atol=1e-5)


class OfTheLastPass(RunHook):
    """A term of what a forward pass has left: asked before one, it would have nothing."""

    def __init__(self, net) -> None:
        self.seen = None
        net.register_forward_hook(lambda module, inputs, output: setattr(self, "seen", output))

    def extra_loss(self):
        seen, self.seen = self.seen, None
        return ExtraLoss(seen.square().sum(), seen.numel())


@pytest.mark.parametrize("rehearses", [False, True])
def test_an_extra_loss_is_asked_after_the_last_forward_pass(rehearses):
    net = model()
    step = program(net)
    step.hooks.add("last", OfTheLastPass(net))
    if rehearses:
        step.rehearse(batch(), 40)
    else:
        assert update(step, batch().split(3)).extra_loss > 0


def test_an_extra_loss_that_is_not_finite_skips_the_update():
    net = model()
    before, step = weights(net), program(net)
    step.hooks.add("decay", Decay(net, count=float("nan")))
    assert update(step, [batch()]).skipped
    assert torch.equal(weights(net), before)


def test_groups_keep_their_proportions():
    one, two = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    step = program(model())
    step.optimizer = torch.optim.SGD(
        [
            {"params": [one], "base_learning_rate": 0.1},
            {"params": [two], "base_learning_rate": 0.4},
        ],
        lr=9.0,
    )
    assert step.set_rate(0.5) == 0.05
    assert [group["lr"] for group in step.optimizer.param_groups] == [0.05, 0.2]
