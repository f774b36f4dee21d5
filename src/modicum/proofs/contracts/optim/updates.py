"""What an optimizer does to weights, whatever their shapes and dtypes."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn

from modicum.core.contracts.parameters import optimizer_groups, trainable
from modicum.core.contracts.stepping import Stepper
from modicum.core.errors import InputError
from modicum.optim.backward import step_in_backward
from modicum.proofs.contracts.base import NotApplicable
from modicum.proofs.contracts.optim.subjects import (
    RATE,
    OptimizerSubject,
    TrainedOptimizer,
    assert_equal,
    bound,
    llama,
    loss,
    numbers,
    optimizers_check,
    small,
    tokens,
)

SHAPES = ((), (1,), (7,), (1, 5), (5, 1), (13, 7), (4, 4), (2, 3, 5), (6, 2, 3, 3))


@optimizers_check(proves="alone")
def check_learns_in_a_plain_loop(subject: OptimizerSubject) -> None:
    """Forty steps on one batch: the loss falls by a fifth at least."""
    model, ids = llama(), tokens(8)
    optimizer, losses = bound(small(subject), model), []
    for _ in range(40):
        found = loss(model, ids)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found.item())
    assert losses[-1] < 0.8 * losses[0], f"the loss goes from {losses[0]:.4f} to {losses[-1]:.4f}"


@optimizers_check()
def check_takes_parameters_as_torch_does(subject: OptimizerSubject) -> None:
    """Bare parameters, named ones and groups of them are taken, and a closure's loss comes back."""
    first, second = nn.Linear(7, 13), nn.Linear(13, 5)
    model = nn.Sequential(first, second)
    fields = small(subject).fields()
    for given in (
        model.parameters(),
        list(model.named_parameters()),
        [{"params": [first.weight]}, {"params": [second.weight], "lr": 0.5}],
    ):
        optimizer = small(subject).optimizer_class(given, lr=RATE, **fields)
        assert {group["lr"] for group in optimizer.param_groups} <= {RATE, 0.5}, "another rate"

        def closure() -> torch.Tensor:
            value = second(first(numbers(4, 7))).square().sum()
            value.backward()
            return value

        before = first.weight.detach().clone()
        found = optimizer.step(closure)
        assert isinstance(found, torch.Tensor), f"step(closure) gives {found!r}, not the loss"
        assert not torch.equal(first.weight, before), "step(closure) changes nothing"


@optimizers_check()
def check_odd_shapes(subject: OptimizerSubject) -> None:
    """Parameters of no to four dimensions, of widths one and odd: all are updated, and finite."""
    parameters = [nn.Parameter(numbers(*shape, name=f"{shape}")) for shape in SHAPES]
    before = [value.detach().clone() for value in parameters]
    optimizer = small(subject).bind([{"params": parameters, "lr": RATE}])
    for step in range(3):
        for value in parameters:
            value.grad = numbers(*value.shape, name=f"{step} {value.shape}")
        optimizer.step()
    for value, old in zip(parameters, before, strict=True):
        assert bool(value.isfinite().all()), f"a parameter of shape {tuple(value.shape)} is not"
        assert not torch.equal(value, old), f"one of shape {tuple(value.shape)} stays as it was"


@optimizers_check()
def check_bf16_parameters(subject: OptimizerSubject) -> None:
    """bf16 parameters stay bf16, are finite, and go where fp32 ones go, to their precision."""
    exact, half = (
        TrainedOptimizer(small(subject)),
        TrainedOptimizer(small(subject), llama(torch.bfloat16)),
    )
    start = dict(llama().named_parameters())
    exact.steps(0, 4)
    half.steps(0, 4)
    for name, value in half.model.named_parameters():
        expected = exact.model.get_parameter(name)
        assert value.dtype == torch.bfloat16, f"{name} is {value.dtype}"
        moved, apart = (expected - start[name]).norm(), (value.float() - expected).norm()
        # A rounding error of 2^-9 a step, of the weight, and gradients that are as rough.
        bar = 0.5 * moved + 4 * 2**-8 * expected.norm()
        assert apart <= bar, f"{name} is {apart:.3g} from the fp32 one, which moved {moved:.3g}"


@optimizers_check()
def check_is_deterministic(subject: OptimizerSubject) -> None:
    """The same steps again, whatever torch's own generator, give the same bits."""
    one, other = TrainedOptimizer(small(subject)), TrainedOptimizer(small(subject))
    one.steps(0, 4)
    torch.manual_seed(99)
    other.steps(0, 4)
    assert_equal(one.model, other.model, "from one run to the next")


@optimizers_check()
def check_missing_gradients(subject: OptimizerSubject) -> None:
    """A parameter without a gradient is left alone, and has no state."""
    training = TrainedOptimizer(small(subject))
    training.backward(0)
    idle = training.model.get_parameter("model.layers.0.mlp.up_proj.weight")
    before, idle.grad = idle.detach().clone(), None
    training.optimizer.step()
    assert torch.equal(idle, before), "a parameter without a gradient changed"
    assert not training.optimizer.state.get(idle), "a parameter without a gradient has state"
    training.optimizer.zero_grad()
    training.steps(1, 3)
    assert not torch.equal(idle, before), "a parameter that was idle once is never updated"


@optimizers_check()
def check_sparse_gradients(subject: OptimizerSubject) -> None:
    """A sparse gradient is refused before anything changes, or taken as a dense one."""
    found: list[list[torch.Tensor]] = []
    for sparse in (False, True):
        weights = [nn.Parameter(numbers(5, 4, name="one")), nn.Parameter(numbers(6, 4))]
        # A group each: the first one's parameters must not be updated when the second is looked at.
        optimizer = small(subject).bind([{"params": [w], "lr": RATE} for w in weights])
        for step in range(2):
            weights[0].grad = numbers(5, 4, name=f"dense {step}")
            rows = numbers(6, 4, name=f"rows {step}") * (torch.arange(6) != step).view(-1, 1)
            weights[1].grad = rows.to_sparse(1) if sparse else rows
            before = [weight.detach().clone() for weight in weights]
            try:
                optimizer.step()
            except InputError as error:
                said = str(error)
                assert sparse, f"dense gradients are refused: {said}"
                assert "sparse" in said, f"what is wrong is not said: {said}"
                same = all(torch.equal(w, old) for w, old in zip(weights, before, strict=True))
                assert same, "weights change before a sparse gradient is refused"
                assert not optimizer.state, "there is state of an update that was refused"
                return
        found.append([weight.detach() for weight in weights])
    for dense, other in zip(*found, strict=True):
        torch.testing.assert_close(other, dense, rtol=1e-6, atol=1e-7)


@optimizers_check()
def check_weight_decay(subject: OptimizerSubject) -> None:
    """With no gradient but zeros, matrices shrink by lr x decay; vectors stay, by metadata.

    An optimizer that has rates of its own for some of its groups says them.
    """
    if "weight_decay" not in small(subject).fields():
        raise NotApplicable("the method has no weight decay")
    model, decay = llama(), 0.3
    optimizer = bound(small(subject, weight_decay=decay), model)
    before = {name: value.detach().clone() for name, value in trainable(model)}
    for value in model.parameters():
        value.grad = torch.zeros_like(value)
    optimizer.step()
    said = getattr(optimizer, "rates", lambda group: (RATE, RATE * decay))
    lost = {id(p): said(group)[1] for group in optimizer.param_groups for p in group["params"]}
    for name, value in trainable(model):
        factor = 1 - lost[id(value)] if value.ndim == 2 else 1.0
        torch.testing.assert_close(value, before[name] * factor, rtol=1e-6, atol=0, msg=name)


@optimizers_check()
def check_learning_rate_of_each_group(subject: OptimizerSubject) -> None:
    """A schedule that sets a group's rate to zero holds its parameters, and no others."""
    training = TrainedOptimizer(small(subject))
    training.steps(0, 1)
    before = copy.deepcopy(training.model)
    held = training.optimizer.param_groups[0]
    held["lr"] = 0.0
    training.steps(1, 2)
    names = {name for name, _ in trainable(training.model)}
    stay = {id(parameter) for parameter in held["params"]}
    for name in names:
        value = training.model.get_parameter(name)
        same = torch.equal(value, before.get_parameter(name))
        assert same == (id(value) in stay), f"{name} {'stays' if same else 'moves'}"


@optimizers_check()
def check_subsets_make_the_whole_step(subject: OptimizerSubject) -> None:
    """Stepping one parameter at a time, in any order, is the full step to the bit."""
    whole, parts = TrainedOptimizer(small(subject)), TrainedOptimizer(small(subject))
    whole.steps(0, 4)
    stepper = Stepper(parts.optimizer)
    for step in range(4):
        parts.backward(step)
        for parameter in reversed(list(parts.model.parameters())):
            stepper.step([parameter])
        parts.optimizer.zero_grad()
    assert_equal(whole.model, parts.model, "when parameters are stepped one by one")


@optimizers_check()
def check_in_the_backward_pass(subject: OptimizerSubject) -> None:
    """Stepped as gradients come, weights are the same to the bit, and no gradient is left."""
    whole, early = TrainedOptimizer(small(subject)), TrainedOptimizer(small(subject))
    whole.steps(0, 4)
    stop = step_in_backward(early.optimizer)
    for step in range(4):
        early.backward(step)
        left = [name for name, value in early.model.named_parameters() if value.grad is not None]
        assert not left, f"the gradient of {left[0]} is still there"
    stop()
    assert_equal(whole.model, early.model, "when it is stepped in the backward pass")


@optimizers_check()
def check_tied_weights_are_one(subject: OptimizerSubject) -> None:
    """A weight that two layers share is in one group, once, and stays shared."""
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    model = nn.Sequential(first, second)
    second.weight = first.weight
    groups = optimizer_groups(model, learning_rate=RATE, weight_decay=0.0)
    optimizer = small(subject).bind(groups)
    listed = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert len(listed) == len(set(listed)) == 3, f"of 3 parameters {len(listed)} are listed"
    model(numbers(4, 6)).square().sum().backward()
    optimizer.step()
    assert second.weight is first.weight, "the weight is no longer shared"
    assert math.isfinite(float(first.weight.detach().sum())), "the weight is not finite"
