"""What an optimizer spends against what its ledger says."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from modicum.core.contracts.ledger import Ledger, OptimizerQuery
from modicum.core.contracts.optimizers import OptimizerMethod
from modicum.core.contracts.parameters import trained_shapes
from modicum.core.errors import InputError
from modicum.core.machine.memory import TensorMeter, bytes_by_kind
from modicum.proofs.contracts.optim.subjects import (
    OptimizerSubject,
    TrainedOptimizer,
    llama,
    optimizers_check,
    small,
)

# Large enough that what a step allocates is not lost among its scalars.
WIDE = {"width": 72, "mlp_width": 200, "vocabulary_size": 301}
SCALARS = 4096


@optimizers_check()
def check_persistent_bytes(subject: OptimizerSubject) -> None:
    """The ledger's bytes of state and gradients are those that are there, exactly, in any dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        training = TrainedOptimizer(small(subject), llama(dtype))
        ledger = _ledger(subject, training)
        training.steps(0, 3)
        training.backward(3)
        found = bytes_by_kind(training.model, training.optimizer)
        for kind in ("optimizer", "gradient"):
            said, there = ledger.bytes(kind), found[kind]
            assert said == there, (
                f"{kind}, {dtype}: the ledger says {said} bytes, there are {there}"
            )


@optimizers_check()
def check_scratch_memory(subject: OptimizerSubject) -> None:
    """A step, with a refresh or without, takes no more on top of state than the ledger says."""
    for dtype in (torch.float32, torch.bfloat16):
        training = TrainedOptimizer(small(subject), llama(dtype, **WIDE))
        said = _ledger(subject, training).bytes("workspace", "step")
        training.steps(0, 1)
        for step in (1, 2):
            training.backward(step)
            with TensorMeter("cpu") as meter:
                training.optimizer.step()
            training.optimizer.zero_grad()
            peak = meter.peak or 0
            assert peak <= said + SCALARS, f"{dtype}: the ledger says {said} bytes, it took {peak}"


@optimizers_check()
def check_work(subject: OptimizerSubject) -> None:
    """The ledger's operations of matrix products in a step are what PyTorch counts."""
    training = TrainedOptimizer(small(subject))
    said = _ledger(subject, training).flops("step")
    training.steps(0, 1)
    training.backward(1)
    with FlopCounterMode(display=False) as counter:
        training.optimizer.step()
    counted = counter.get_total_flops()
    assert counted == said, f"the ledger says {said} operations, PyTorch counts {counted}"


@optimizers_check()
def check_sizes_that_fit_no_matrix(subject: OptimizerSubject) -> None:
    """A rank above all widths and a density of nothing are known before the first step.

    Blocks of a size that divides no matrix, or is above it, work, with the bytes of the ledger.
    """
    fields = small(subject).fields()
    at = OptimizerQuery(trained_shapes(llama()))
    if "rank" in fields:
        widths = small(subject, rank=1 << 20).projects(at)
        assert widths, "of a rank above all widths no matrix is named"
    if "density" in fields:
        known = _refuses_or_names(small(subject, density=1e-9), at)
        assert known, "of a density that rounds to nothing no matrix is named, and it is taken"
    for size in (7, 1 << 20) if "block_size" in fields else ():
        training = TrainedOptimizer(small(subject, block_size=size))
        said = small(subject, block_size=size).ledger(at).bytes("optimizer")
        training.steps(0, 2)
        there = bytes_by_kind(training.model, training.optimizer)["optimizer"]
        assert said == there, f"blocks of {size}: the ledger says {said} bytes, there are {there}"
        finite = all(bool(p.isfinite().all()) for p in training.model.parameters())
        assert finite, f"with blocks of {size} a weight is not finite"


def _refuses_or_names(value: OptimizerMethod, at: OptimizerQuery) -> bool:
    """Whether a density is refused, or the matrices are named that it takes nothing of."""
    try:
        value.ledger(at)
    except InputError as error:
        return error.field == "density"
    return bool(value.rounds_away(at))


def _ledger(subject: OptimizerSubject, training: TrainedOptimizer) -> Ledger:
    return small(subject).ledger(OptimizerQuery(trained_shapes(training.model)))
