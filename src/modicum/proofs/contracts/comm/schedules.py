"""What a schedule must not change: weights, losses, norms, checkpoints."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from modicum.core.contracts.state import StateRegistry, optimizer_view
from modicum.core.contracts.strategy import Strategy
from modicum.core.errors import InputError
from modicum.proofs.contracts.comm.subjects import (
    STEPS,
    CommSubject,
    Odd,
    comm_check,
    furthest,
    loss_of,
    optimizer_of,
    plain,
    schedule,
    scheduled,
    two_ranks,
    weights,
)
from modicum.proofs.contracts.comm.two_ranks import on_two_ranks


@comm_check(proves="alone")
def check_one_process(subject: CommSubject) -> None:
    """Alone, a flushed model is that of a plain loop, to the bit."""
    model, handle = scheduled(schedule(subject))
    handle.flush()
    reference, _ = plain()
    different = furthest(weights(model), weights(reference))
    assert not different, f"after {STEPS} steps a weight differs by {different:.3g}"
    handle.flush()
    assert furthest(weights(model), weights(reference)) == 0, "a second flush changes weights"


@comm_check()
def check_forward_sees_new_weights(subject: CommSubject) -> None:
    """A forward pass after a step computes with the new weights, whether flushed or not."""
    model, _ = scheduled(schedule(subject))
    reference, _ = plain()
    with torch.no_grad():
        for step in (1, 2):  # one that skips a layer, one that does not
            found, wanted = loss_of(model, step), loss_of(reference, step)
            assert torch.equal(found, wanted), (
                f"the loss is {found:.6f}, and should be {wanted:.6f}"
            )


@comm_check()
def check_accumulation_and_clipping(subject: CommSubject) -> None:
    """Several backward passes add up, and clipping scales their sum by its norm."""
    models = [Odd(), Odd()]
    theirs = optimizer_of(models[1])
    handle = schedule(subject).wrap(models[0], optimizer_of(models[0]))
    trained = [parameter for parameter in models[1].parameters() if parameter.requires_grad]
    for step in range(STEPS):
        for part in range(3):
            handle.backward(loss_of(models[0], step, part), last=part == 2)
            loss_of(models[1], step, part).backward()
        gradients = [p.grad.double() for p in trained if p.grad is not None]
        wanted = nn.utils.get_total_norm(gradients).float()
        nn.utils.clip_grads_with_norm_(trained, 0.5, wanted)
        norm = handle.step(clip_norm=0.5)
        assert norm is not None, "step(clip_norm=...) gives no norm"
        assert math.isclose(norm, wanted, rel_tol=1e-4), (
            f"the norm in step {step} is {norm:.6f}, and should be {wanted:.6f}"
        )
        theirs.step()
        theirs.zero_grad()
    handle.flush()
    different = furthest(weights(models[0]), weights(models[1]))
    assert different < 1e-3, f"a weight differs by {different:.3g}"


@comm_check()
def check_hyper_parameters_of_the_step(subject: CommSubject) -> None:
    """An update uses the learning rate that was set when the step was made."""
    value, found = schedule(subject), []
    for wrapped in (True, False):
        model = Odd()
        optimizer = optimizer_of(model)
        handle = value.wrap(model, optimizer) if wrapped else None
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = 10.0 ** -(1 + step % 3)
            if handle is None:
                loss_of(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                handle.backward(loss_of(model, step))
                handle.step()
            optimizer.param_groups[0]["lr"] = math.nan
        if handle is not None:
            handle.flush()
        found.append(weights(model))
    assert furthest(*found) == 0, "an update uses the learning rate of another step"


@comm_check()
def check_no_update_of_what_is_not_finite(subject: CommSubject) -> None:
    """An update whose gradients are not finite changes nothing, and the next one is made."""
    model, handle = scheduled(schedule(subject), 2)
    handle.flush()
    before = weights(model)
    handle.backward(loss_of(model, 2) * math.inf)
    handle.step(clip_norm=1.0)
    handle.flush()
    assert furthest(weights(model), before) == 0, "gradients that are not finite change weights"
    handle.backward(loss_of(model, 2))
    handle.step(clip_norm=1.0)
    handle.flush()
    different = furthest(weights(model), weights(plain(3)[0]))
    assert different < 1e-2, f"the next update is off by {different:.3g}"


@comm_check()
def check_state_and_resume(subject: CommSubject) -> None:
    """A flushed checkpoint holds what one process's holds, and training continues to the bit."""
    value = schedule(subject)
    model, handle = scheduled(value, 4)
    handle.flush()
    saved = _registry(handle.strategy, model, handle.optimizer).read()
    reference, optimizer = plain(4)
    wanted = _registry(Strategy(), reference, optimizer).read()
    for view, entries in wanted.items():
        names = sorted(saved[view].keys() ^ entries.keys())
        assert not names, f"the state {view!r} of the schedule and of one process differ in {names}"
    again = Odd()
    other = value.wrap(again, optimizer_of(again))
    _registry(other.strategy, again, other.optimizer).write(saved)
    for step in (4, 5):
        other.backward(loss_of(again, step))
        other.step()
    other.flush()
    assert furthest(weights(again), weights(plain(6)[0])) == 0, "a resumed run is another one"


@comm_check(expensive=True)
def check_two_ranks(subject: CommSubject) -> None:
    """At two ranks, weights and losses are those of plainly summed gradients, alike on both."""
    for rank, found in enumerate(on_two_ranks(two_ranks, schedule(subject))):
        assert found["alike"], "the ranks' weights differ"
        assert found["distance"] <= 1e-5, f"rank {rank}: a weight is off by {found['distance']:.3g}"
        assert found["losses"] <= 1e-5, f"rank {rank}: a loss is off by {found['losses']:.3g}"


def _registry(
    strategy: Strategy, model: nn.Module, optimizer: torch.optim.Optimizer
) -> StateRegistry:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        group["names"] = [names[id(parameter)] for parameter in group["params"]]
    registry = StateRegistry()
    strategy.register(registry, model)
    registry.add_view(optimizer_view(optimizer))
    return registry


@comm_check()
def check_a_model_in_ddp_is_refused(subject: CommSubject) -> None:
    """A model whose gradients something else sums already is refused, and nothing is changed."""
    value, model = schedule(subject), Odd()
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)  # no process group is needed
    nn.Module.__init__(wrapped)
    wrapped.module = model
    said = ""
    try:
        value.wrap(wrapped, optimizer_of(model))
    except InputError as error:
        said = str(error)
    assert "sums gradients itself" in said, f"it is not refused, or not with the reason: {said}"
    assert not any(module._forward_pre_hooks for module in model.modules()), "hooks were left"
