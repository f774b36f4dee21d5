"""The worst micro-batch first: step 0 proves that the longest rows and the evaluation fit.

A rehearsal is forward and backward with nothing learned from them: weights, buffers, gradients and
random generators are afterwards what they were. What comes later, such as the optimizer's moments,
is there as ballast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modicum.core.contracts.state import random_state
from modicum.core.errors import Restart
from modicum.core.machine.memory import release
from modicum.core.ranks.ranks import Ranks
from modicum.data.rows import AnyBatch
from modicum.trainer.out_of_memory import halved, ran_out

Run = Callable[[Any], object]
# Ballast is held in pieces, as the optimizer's moments will be.
_PIECE = 32 * 2**20


def rehearse(
    model: nn.Module,
    *,
    run_step: Run,
    run_evaluation: Run | None = None,
    steps: Iterable[AnyBatch],
    evaluation: AnyBatch | None = None,
    accumulates: bool = True,
    ballast_bytes: int = 0,
    device: torch.device | str = "cpu",
) -> None:
    """Run micro-batches as an update and the evaluation will, and leave no trace of it.

    Args:
        run_step: forward and backward of one micro-batch; gradients may add up in `.grad`.
        run_evaluation: forward in evaluation mode, without gradients.
        steps: micro-batches for `run_step`, the worst first, which comes last once more. Others
            where compiled blocks should meet every shape before the first update.
        evaluation: the micro-batch for `run_evaluation`; None where nothing is evaluated.
        accumulates: whether an update adds up gradients of several micro-batches; else there are
            none when a pass begins, and a rehearsal with some would take more than any update.
        ballast_bytes: what will be allocated later and stay: the optimizer's state where there is
            none yet. It is held, and written to, while the passes run. Gaps in the allocator's
            memory come and go: what fits by a hair now may not later, so ask for some more.

    Raises:
        Exception: whatever the passes raise; `is_out_of_memory` tells whether memory ran out.
    """
    with untouched(model):
        ballast = _ballast(ballast_bytes, torch.device(device))
        try:
            model.train()
            micro_batches = list(steps)
            for batch in micro_batches:
                run_step(batch)
                if not accumulates:
                    _forget_gradients(model)
            if run_evaluation is not None and evaluation is not None:
                model.eval()
                with torch.no_grad():
                    run_evaluation(evaluation)
                model.train()
            # Once more, among the gaps that the first passes left in the allocator's memory.
            for batch in micro_batches[:1]:
                run_step(batch)
        finally:
            ballast.clear()
    release()


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Put back what forward and backward change, however the block is left.

    Generators, buffers and the mode of every module become what they were. Gradients become None,
    as they are between updates. Of buffers that a module says are constant, as frozen weights can
    be, no copy is kept: it would make the process larger than the run does.
    """
    read, write = random_state()
    generators = read()
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, tensor, None if tensor is None else tensor.detach().clone())
        for module in model.modules()
        for name, tensor in module._buffers.items()
        if name not in getattr(module, "constant_names", ())
    ]
    try:
        yield
    finally:
        _forget_gradients(model)
        for module, training in modes:
            module.training = training
        for module, name, tensor, value in buffers:
            _restore(module, name, tensor, value)
        write(generators)


def _forget_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


@torch.no_grad()
def _restore(module: nn.Module, name: str, tensor: Tensor | None, value: Tensor | None) -> None:
    if tensor is not None and value is not None:
        tensor.copy_(value)
    module._buffers[name] = tensor  # a forward pass may have put another tensor in its place


def _ballast(size: int, device: torch.device) -> list[Tensor]:
    """Tensors of `size` bytes together. Written to: a page nobody wrote to takes no memory."""
    pieces = [min(_PIECE, size - start) for start in range(0, size, _PIECE)]
    return [torch.full((piece,), 1, dtype=torch.uint8, device=device) for piece in pieces]


def first_that_fits(
    attempt: Callable[[int], object],
    micro_batch_size: int,
    *,
    smaller: Callable[[int, str], None],
    ranks: Ranks | None = None,
    changes: Iterable[str] | None = None,
) -> int:
    """The micro-batch size with which `attempt` has memory enough, halved as often as it takes.

    Alone, a process tries again at once. Among several ranks the others may wait inside an exchange
    for the one that failed, so all have to begin anew, with the size that `smaller` wrote down.

    Args:
        attempt: rehearses a size.
        smaller: is called with each smaller size before it is tried, and what memory ran out with.
        changes: what would make a single sequence fit, in words; None for general advice.

    Raises:
        DoesNotFit: a single sequence does not fit.
        Restart: a smaller size was written down, and there are other ranks.
    """
    ranks = ranks or Ranks()
    size = micro_batch_size
    while (said := ran_out(partial(attempt, size))) is not None:
        size = halved(size) if changes is None else halved(size, changes)
        smaller(size, said)
        if not ranks.alone:
            raise Restart(f"memory ran out on {ranks.name}; all begin anew with smaller batches")
    ranks.min(size)  # nobody starts before everybody has seen that it fits
    return size
