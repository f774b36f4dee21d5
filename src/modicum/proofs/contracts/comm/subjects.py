"""What the checks of schedules work on: a small model, a loop with and without the schedule."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from modicum.comm.base import Schedule, Wrapped
from modicum.core.contracts.method import Method
from modicum.core.contracts.strategy import Strategy
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import whole
from modicum.proofs.contracts.base import NotApplicable, check
from modicum.proofs.distances import worst

CommSubject = type[Method] | Method

comm_check = partial(check, "comm")
STEPS = 6
NamedWeights = dict[str, Tensor]


def schedule(subject: CommSubject) -> Schedule:
    """The value to be checked, with a few layers to a group where the method has groups.

    Raises:
        NotApplicable: the method is no schedule.
    """
    value = subject if isinstance(subject, Method) else subject.tiny()
    if not isinstance(value, Schedule):
        raise NotApplicable(f"{value.info.name} is no schedule, and this is a check of schedules")
    return value


class Odd(nn.Module):
    """Widths that no number of ranks divides, a frozen layer, one of bf16, one that is skipped.

    Its embedding is tied, so that one weight is used first and last. With `zeros`, a layer that is
    skipped has a gradient of zeros, as FSDP2 gives it, and not none.
    """

    zeros = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 7)
        self.wide, self.frozen = nn.Linear(7, 13), nn.Linear(13, 13)
        self.narrow = nn.Linear(13, 7, dtype=torch.bfloat16)
        self.sometimes, self.never = nn.Linear(7, 7), nn.Linear(7, 7)
        self.frozen.requires_grad_(False)

    def forward(self, ids: Tensor, *, skip: bool) -> Tensor:
        x = self.frozen(self.wide(self.embedding(ids)).tanh()).tanh()
        x = self.narrow(x.bfloat16()).float()
        if not skip:
            x = self.sometimes(x)
        elif self.zeros:
            x = x + 0 * self.sometimes(x)
        return x @ self.embedding.weight.T


def loss_of(model: nn.Module, step: int, rank: int = 0) -> Tensor:
    """A mean loss that depends on the step and on the rank; every third step skips a layer."""
    ids = torch.randint(11, (5, 3), generator=torch.Generator().manual_seed(97 * step + rank))
    return nn.functional.cross_entropy(
        model(ids, skip=step % 3 == 1).flatten(0, 1), (ids.flatten() + 1) % 11
    )


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with momentum, decay and state, so that an update made twice or too late shows."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)


def weights(model: nn.Module) -> NamedWeights:
    """Copies of all parameters by name, in full."""
    return {name: whole(value.detach()).clone() for name, value in model.named_parameters()}


def furthest(one: NamedWeights, other: NamedWeights) -> float:
    """The largest difference of an element; infinite where one is not finite."""
    return worst(float((one[name].float() - other[name].float()).abs().max()) for name in one)


def plain(steps: int = STEPS) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after some steps of a plain loop."""
    model = Odd()
    optimizer = optimizer_of(model)
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def scheduled(value: Schedule, steps: int = STEPS) -> tuple[nn.Module, Wrapped]:
    """The same under a schedule, not flushed."""
    model = Odd()
    handle = value.wrap(model, optimizer_of(model))
    for step in range(steps):
        handle.backward(loss_of(model, step))
        handle.step()
    return model, handle


def two_ranks(ranks: Ranks, value: Schedule) -> dict[str, Any]:
    """How far a schedule's weights are from plain sums and from the other rank's; its traffic."""
    ours, handle, losses = _trained(ranks, value.strategy(ranks, Layout.of(ranks.size)))
    theirs, _, their_losses = _trained(ranks, _Summed(ranks))
    meter = cast("Any", handle).collectives.meter
    digests = ranks.gather({name: float(w.double().sum()) for name, w in ours.items()})
    return {
        "distance": furthest(ours, theirs),
        "losses": worst(abs(a - b) for a, b in zip(losses, their_losses, strict=True)),
        "alike": all(digest == digests[0] for digest in digests),
        "sent": dict(meter.bytes),
        "calls": dict(meter.calls),
    }


class _Summed(Strategy):
    """Data parallelism at its plainest: all gradients are summed when the backward is over."""

    def start(self, model: nn.Module) -> None:
        super().start(model)
        self._model = model

    def after_backward(self) -> None:
        for _, parameter in self.trained(self._model):
            used = self.ranks.sum(float(parameter.grad is not None))[0]
            if used and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if used:
                torch.distributed.all_reduce(parameter.grad)
        super().after_backward()


def _trained(ranks: Ranks, strategy: Strategy) -> tuple[NamedWeights, Strategy, list[float]]:
    """Weights and losses of a loop as the trainer's: two micro-batches, sums over ranks."""
    model, losses = Odd(), []
    strategy.start(model)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        for part in range(2):
            loss = loss_of(model, step, 2 * ranks.rank + part) / (2 * ranks.size)
            strategy.before_backward(last=part == 1)
            loss.backward()
            losses.append(float(loss.detach()))
        strategy.after_backward()
        strategy.update(optimizer)
        optimizer.zero_grad(set_to_none=True)
    strategy.flush()
    return weights(model), strategy, losses
