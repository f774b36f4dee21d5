"""A bench for schedules: layers that sleep or multiply, and ways to share their gradients.

What is here runs at ranks that a proof has started.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modicum.comm.dear import DeAR
from modicum.comm.deferred import IN_FLIGHT, Deferred
from modicum.core.contracts.strategy import Strategy
from modicum.core.ranks.call_queue import CollectiveHandle
from modicum.core.ranks.collectives import Collectives
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.pretended_link import Link
from modicum.core.ranks.ranks import Ranks
from modicum.proofs.bench.busy_cores import BusyCores
from modicum.proofs.bench.meters import in_turns
from modicum.proofs.comm.links import sent
from modicum.proofs.distances import worst

Fields = Mapping[str, Any]
TUNING = 56  # updates after which DeAR's tuner has chosen


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward: float, backward: float) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.seconds = backward
        time.sleep(forward)
        return x + weight[:1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        time.sleep(ctx.seconds)
        (weight,) = ctx.saved_tensors
        return gradient, torch.full_like(weight, 1e-6), None, None


class Sleeping(nn.Module):
    """A layer of so many weights that computes for given times, and takes no core for it."""

    def __init__(self, elements: int, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements))
        self.seconds = (forward, backward)

    def forward(self, x: Tensor) -> Tensor:
        """Add the first weight to x, after a while."""
        result: Tensor = _Sleep.apply(x, self.weight, *self.seconds)
        return result


class _Then(CollectiveHandle):
    """A handle that only has to be asked."""

    def __init__(self, result: Callable[[], Tensor]) -> None:
        self._result = result

    def wait(self) -> Tensor:
        return self._result()


class Undivided(Collectives):
    """An all-reduce in place of both halves: what plain data parallelism exchanges, and when.

    Weights are then updated without a wait in the next forward pass.
    """

    def reduce_scatter(
        self, buffer: Tensor, *, label: str = "", priority: int = 0
    ) -> CollectiveHandle:
        """This rank's part of the buffer, all of which is summed in place."""
        whole = self.all_reduce(buffer, label=label, priority=priority)
        return _Then(lambda: whole.wait().chunk(self.size)[self.rank])

    def all_gather(
        self, shard: Tensor, into: Tensor | None = None, *, label: str = "", priority: int = 0
    ) -> CollectiveHandle:
        """The buffer itself, which has it all."""
        return super().all_gather(shard, label=label) if into is None else _Then(lambda: into)


class OwnReduceScatter(Collectives):
    """The library's reduce-scatter, which on gloo is an all-reduce inside."""

    def reduce_scatter(
        self, buffer: Tensor, *, label: str = "", priority: int = 0
    ) -> CollectiveHandle:
        """This rank's part of the sum."""
        shard = buffer.new_empty(buffer.numel() // self.size)
        call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        work = call(shard, buffer, async_op=True)

        def result() -> Tensor:
            work.wait()
            return shard

        return _Then(result)


_ENGINES: dict[str, type[Collectives]] = {
    "dear": Collectives,
    "undivided": Undivided,
    "own reduce-scatter": OwnReduceScatter,
}


def shared(
    ranks: Ranks, arm: str, layers: list[nn.Module], link: Link | None, fields: Fields
) -> tuple[nn.Module, Strategy]:
    """Layers under one way to share their gradients: the model as it is called, and its strategy.

    Args:
        arm: `dear`; DeAR's `undivided` or with the library's `own reduce-scatter`; PyTorch's `ddp`
            (with `bucket_bytes`) or `fsdp2`.
    """
    model: nn.Module = nn.Sequential(*layers)
    if arm == "ddp":
        megabytes = fields.get("bucket_bytes", 25_000_000) / 2**20
        return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=megabytes), Strategy()
    if arm == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        mesh = Layout.of(ranks.size, ranks.size).mesh("cpu")
        for layer in [*layers, model]:
            fully_shard(layer, mesh=mesh)
        return model, Strategy()
    strategy = DeAR(**fields).strategy(ranks, Layout.of(ranks.size), link=link)
    strategy.collectives = _ENGINES[arm](ranks, link=link, in_flight=IN_FLIGHT)
    strategy.start(model)
    return model, strategy


def layers_of(
    layers: int, elements: int, forward: float = 0.0, backward: float = 0.0, rows: int = 0
) -> tuple[list[nn.Module], Tensor]:
    """Layers of so many weights, and what goes into the first.

    Args:
        forward, backward: seconds that a layer sleeps.
        rows: rows that square matrices multiply, instead of sleeping.
    """
    if not rows:
        asleep: list[nn.Module] = [Sleeping(elements, forward, backward) for _ in range(layers)]
        return asleep, torch.zeros(1)
    width = math.isqrt(elements)
    return [nn.Linear(width, width, bias=False) for _ in range(layers)], torch.ones(rows, width)


def timings(
    ranks: Ranks,
    *,
    arms: Mapping[str, Fields],
    model: Fields,
    rate: float = math.inf,
    latency: float = 0.0,
    steps: int = 3,
    repeats: int = 3,
) -> dict[str, Any]:
    """Seconds of a step of each arm, of interleaved blocks, and bytes that eth0 sent.

    `seconds` are the median block's, `fastest` those of the one that other processes disturbed the
    least, `busy` the part of the machine's processors in use meanwhile.

    Args:
        arms: by label, the method's fields, and `arm` as in `shared`, where that is not the label.
        model: the arguments of `layers_of`.
        rate, latency: of a pretended link, in bytes and seconds.
        steps: in a block, after one that is not timed.
    """
    ready: dict[str, Callable[[], None]] = {}
    strategies: dict[str, Strategy] = {}
    for label, given in arms.items():
        layers, x = layers_of(**model)
        link = Link(rate, latency) if latency or rate < math.inf else None
        fields = {key: value for key, value in given.items() if key != "arm"}
        called, strategy = shared(ranks, given.get("arm", label), layers, link, fields)
        ready[label] = _step(called, x, strategy)
        strategies[label] = strategy
        for _ in range(1 + TUNING * bool(fields.get("tune"))):
            ready[label]()
        strategy.flush()
        dist.barrier()
    before, carried, busy = 0, dict.fromkeys(arms, 0), {label: BusyCores() for label in arms}

    def begin(label: str) -> None:
        nonlocal before
        before = sent()  # nothing of the block before is on the way
        ready[label]()
        dist.barrier()
        busy[label].begin()

    def block(label: str) -> None:
        for _ in range(steps):
            ready[label]()

    def count(label: str, counts: bool) -> None:
        busy[label].end()
        strategies[label].flush()
        dist.barrier()
        carried[label] += sent() - before

    blocks = {label: partial(block, label) for label in arms}
    times = in_turns(blocks, repeats, warm_up=0, before=begin, after=count)
    return {
        "seconds": {label: each.median / steps for label, each in times.items()},
        "fastest": {label: each.fastest / steps for label, each in times.items()},
        "sent": {label: count / ((steps + 1) * repeats) for label, count in carried.items()},
        "busy": {label: each.share for label, each in busy.items()},
        "groups": {k: len(s.groups) for k, s in strategies.items() if isinstance(s, Deferred)},
    }


def series(ranks: Ranks, *, runs: list[Fields]) -> list[dict[str, Any]]:
    """Several `timings`, one after the other, at ranks that are started once."""
    return [timings(ranks, **run) for run in runs]


def _step(model: nn.Module, x: Tensor, strategy: Strategy) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        loss = model(x).sum()
        strategy.before_backward(last=True)
        loss.backward()
        strategy.after_backward()
        strategy.update(optimizer)
        optimizer.zero_grad()

    return step


def compute_seconds(ranks: Ranks, *, model: Fields, repeats: int = 5) -> tuple[float, float]:
    """Seconds of a forward and of a backward pass at this rank, while all ranks compute."""
    layers, x = layers_of(**model)
    called, loss = nn.Sequential(*layers), torch.zeros(())

    def forward() -> None:
        nonlocal loss
        loss = called(x).sum()

    def together(label: str) -> None:
        if label == "forward":
            dist.barrier()

    passes = {"forward": forward, "backward": lambda: loss.backward()}
    times = in_turns(passes, repeats, before=together)
    return times["forward"].median, times["backward"].median


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}


def distance_from_ddp(
    ranks: Ranks, *, optimizers: list[str], flush: bool = True, steps: int = 20
) -> float:
    """The largest difference of a weight from PyTorch's DDP after some steps, of odd sizes."""
    different = 0.0
    for name in optimizers:
        models = []
        for ours in (True, False):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5))
            optimizer = OPTIMIZERS[name](model.parameters())
            handle = DeAR(layers=1).wrap(model, optimizer) if ours else None
            called = model if ours else nn.parallel.DistributedDataParallel(model)
            for step in range(steps):
                generator = torch.Generator().manual_seed(100 * step + ranks.rank)
                x = torch.randn(6, 7, generator=generator)
                loss = (called(x) - x[:, :5]).square().mean()
                if handle is None:
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                else:
                    handle.backward(loss)
                    handle.step()
            if handle is not None and flush:
                handle.flush()
            models.append(nn.utils.parameters_to_vector(model.parameters()).detach())
        different = worst((different, float((models[0] - models[1]).abs().max())))
    return different
