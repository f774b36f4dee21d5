"""Whether a run's blocks are compiled: one is tried, compared with the eager one, and timed.

It is decided once and written down, so that a run that resumes computes what it computed before.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modicum.core.contracts.step import autocast
from modicum.core.ranks.ranks import Ranks
from modicum.core.torch_compiler import graph_breaks
from modicum.core.units import format_duration
from modicum.data.rows import AnyBatch
from modicum.recipe import Recipe
from modicum.tasks import AnyTask, task_of
from modicum.trainer.compiled_blocks import (
    Forward,
    compiled_forward,
    eager_forward,
    raise_if_stopped,
    reason_of,
)
from modicum.trainer.rehearsal import untouched

# `auto` tries compiling only in runs predicted to take longer than this.
WORTH_A_TRIAL_SECONDS = 600.0
PAIRS = 7
# The largest distance of compiled numbers from eager ones, relative to the latter's norm.
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}


@dataclass(frozen=True)
class Decision:
    """Whether blocks are compiled, and why.

    Args:
        compile: the decision; `value` spells it as the recipe does.
        seconds: what compiling took in the trial; 0 without one.
        gain: seconds that a block's forward and backward pass takes less than eager.
        failed: whether it was wanted, or tried, and does not work.
    """

    compile: bool
    why: str
    seconds: float = 0.0
    gain: float = 0.0
    failed: bool = False

    @property
    def told(self) -> str:
        """The decision as a sentence for people."""
        return f"blocks run {'compiled' if self.compile else 'eagerly'}: {self.why}"

    @property
    def value(self) -> str:
        """`blocks` or `none`."""
        return "blocks" if self.compile else "none"


def decide(
    model: Any,
    recipe: Recipe,
    worst: AnyBatch,
    *,
    passes: int,
    seconds: float,
    ranks: Ranks | None = None,
    check: Callable[[], None] = lambda: None,
) -> Decision:
    """Whether the blocks of a new run should be compiled; tries it on one block where that is open.

    The model must be complete on this rank: before it is sharded. It is left as it was found.

    Args:
        worst: a micro-batch of the run's largest shape.
        passes: block passes (forward and backward of one micro-batch) that this rank has to do.
        seconds: the run's predicted duration.
        check: raises where a stop was asked for.

    Raises:
        StopRequested: from `check`.
    """
    ranks = ranks or Ranks()
    mode = recipe.training.compile
    if mode == "none":
        return Decision(False, "the recipe says so")
    if opposed := without_trait(recipe):
        return Decision(False, f"{opposed} does not claim to work compiled", failed=True)
    seconds = ranks.broadcast(seconds)
    if mode == "auto" and seconds < WORTH_A_TRIAL_SECONDS:
        told = format_duration(seconds)
        return Decision(False, f"a run of about {told} is too short to win compiling's time back")

    def attempt(rounds: int) -> Decision:
        return _attempt(
            model, task_of(recipe), worst, recipe.training.precision, passes, mode, rounds, check
        )

    # One after the other, so that the second finds in the compiler's cache what the first made.
    decision = ranks.first_alone(lambda: attempt(PAIRS) if ranks.first else None, check)
    decision = Decision(**ranks.broadcast(asdict(decision) if decision is not None else None))
    if not decision.compile or ranks.alone:
        return decision
    own = decision if ranks.first else attempt(0)
    if ranks.min(float(own.compile))[0]:
        return decision
    reasons = ranks.gather(None if own.compile else own.why)
    rank, why = next((rank, why) for rank, why in enumerate(reasons) if why is not None)
    return replace(decision, compile=False, failed=True, why=f"on rank {rank}, {why}")


def without_trait(recipe: Recipe) -> str | None:
    """The recipe's first method that lacks the trait `compiles`, by slot and name.

    >>> without_trait(Recipe())
    """
    for slot, record in recipe.methods().items():
        if "compiles" not in record.info.traits:
            return f"{slot}.method {record.name}"
    return None


# One block's trial


def _attempt(
    model: Any,
    task: AnyTask,
    worst: AnyBatch,
    precision: str,
    passes: int,
    mode: str,
    rounds: int,
    check: Callable[[], None],
) -> Decision:
    """Compile one block, compare it with the eager one, time both `rounds` times, and judge."""
    try:
        with untouched(model):
            model.train()
            trial = CompileTrial(model, task, worst, precision)
            decision = trial.judged(passes, mode, rounds)
    except Exception as error:
        check()  # a stop that was asked for may look like the compiler's failure
        raise_if_stopped(error)
        return Decision(False, f"compiling does not work here: {reason_of(error)}", failed=True)
    check()  # the compiler may have swallowed the request
    return decision


class CompileTrial:
    """The first block with the input that it gets, run eagerly and compiled."""

    def __init__(self, model: Any, task: AnyTask, worst: AnyBatch, precision: str) -> None:
        self.device = next(model.parameters()).device
        self.precision, self.recompute = precision, model.recompute
        block = next(iter(model.blocks))
        self.x, *more, keywords = _input_of(block, model, task, worst.to(self.device), precision)
        self.more, self.keywords = more, keywords
        self.parameters = [p for p in block.parameters() if p.requires_grad]
        self.eager, self.compiled = eager_forward(block), compiled_forward(block)
        generator = torch.Generator().manual_seed(0)
        self.gradient = torch.randn(self.x.shape, generator=generator).to(self.x)

    def run(self, forward: Forward) -> list[Tensor]:
        """The output and all gradients; dropout is the same every time."""
        torch.manual_seed(0)
        x = self.x.detach().requires_grad_()
        with autocast(self.device, self.precision):
            if self.recompute:
                run = partial(forward, **self.keywords)
                output = checkpoint(run, x, *self.more, use_reentrant=False)
            else:
                output = forward(x, *self.more, **self.keywords)
        streams = output[0] if isinstance(output, tuple) else output
        streams = streams if isinstance(streams, tuple) else (streams,)
        # Not `backward`: it would set gradients, and run the hooks on them.
        wanted = [x, *self.parameters]
        gradients = [self.gradient.to(stream) for stream in streams]
        found = torch.autograd.grad(streams, wanted, gradients)
        return [streams[-1].detach(), *found]

    def timed(self, forward: Forward) -> float:
        """Seconds of a pass."""
        start = self._now()
        self.run(forward)
        return self._now() - start

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def judged(self, passes: int, mode: str, rounds: int) -> Decision:
        """The decision; without rounds, whether it works is all that counts."""
        expected = self.run(self.eager)
        breaks, start = graph_breaks(), self._now()
        found = self.run(self.compiled)
        compiling = self._now() - start
        distance = _distance(found, expected)
        del found, expected
        if not distance <= TOLERANCE[self.precision]:  # also where it is no number
            told = f"compiled, a block computes something else: it differs by {distance:.2g}"
            return Decision(False, told, compiling, failed=True)
        if not rounds:
            return Decision(True, "it works", compiling)
        pairs = [(self.timed(self.eager), self.timed(self.compiled)) for _ in range(rounds)]
        eager, compiled = (statistics.median(side) for side in zip(*pairs, strict=True))
        gain = statistics.median(one - other for one, other in pairs)
        won = gain * passes
        pays = gain > 0 and (mode == "blocks" or won > compiling)
        told = f"a block's pass takes {compiled * 1e3:.3g} ms compiled, {eager * 1e3:.3g} ms eager"
        if (count := graph_breaks() - breaks) > 0:
            told += f" ({count} graph breaks)"
        if gain > 0:
            told += f", which wins {format_duration(won)} for {format_duration(compiling)} of "
            told += "compiling"
        return Decision(pays, told, compiling, gain)


class _Taken(Exception):
    """A block's input is known, and the rest of the forward pass of no interest."""


@torch.no_grad()
def _input_of(
    block: nn.Module, model: nn.Module, task: AnyTask, batch: AnyBatch, precision: str
) -> list[Any]:
    """What a block gets in a forward pass: the stream of activations, the rest, and keywords."""
    taken: list[Any] = []

    def take(*arguments: Any, **keywords: Any) -> None:
        taken.extend((*arguments, keywords))
        raise _Taken

    own = block.__dict__.get("forward")
    block.forward = take
    try:
        with autocast(batch.device, precision):
            task.loss_sum(model, batch)
    except _Taken:
        pass
    finally:
        del block.forward
        if own is not None:
            block.forward = own
    return taken


def _distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest ||found - expected|| / ||expected|| over the tensors."""
    norms = [float(tensor.float().norm()) for tensor in expected]
    # A gradient that is zero but for rounding, as that of a key's bias, says nothing by itself.
    least = 0.1 * max(norms[1:])
    scales = [norms[0], *(max(norm, least) for norm in norms[1:])]
    distances = [
        float((a.float() - b.float()).norm()) / max(scale, 1e-30)
        for a, b, scale in zip(found, expected, scales, strict=True)
    ]
    return max(distances, key=lambda value: float("inf") if value != value else value)
