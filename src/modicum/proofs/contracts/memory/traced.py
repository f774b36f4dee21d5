"""What a policy's shares come to in a trace of a classifier, against the arithmetic of both."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.core.contracts.ledger import Ledger, ModelQuery
from modicum.core.layers.meta import on_meta
from modicum.core.layers.saved_tensors import Shares
from modicum.core.layers.trace_moves import Scratch
from modicum.memory.foreseen import ForeseenActivations
from modicum.models.convnet import ConvNet
from modicum.models.convnet_ledger import ledger
from modicum.models.traced_ledger import TracedModel
from modicum.proofs.contracts.memory.subjects import CONFIG, MemorySubject, memory_check, small

_ROWS = 48
_WITHIN = 0.05


@memory_check()
def check_the_trace_keeps_what_the_ledger_says(subject: MemorySubject) -> None:
    """From the least to the most that may be left, a trace and the arithmetic agree to 5 %."""
    asked = small(subject).shares(4)
    for name, shares in zip(("least", "expected", "most"), asked, strict=True):
        found = _traced(subject, shares)
        said = ledger(CONFIG, ModelQuery(_ROWS, 1), shares=shares)
        kept = [each.bytes("activation", "loss") for each in (found, said)]
        problem = f"of the {name} the trace keeps {kept[0]} bytes, the ledger says {kept[1]}"
        assert abs(kept[0] - kept[1]) <= _WITHIN * kept[1], problem
        peaks = found.by_phase()
        for phase, bytes_said in said.by_phase().items():
            problem = f"at the {name} the trace has {peaks[phase]} bytes in phase {phase}"
            near = abs(peaks[phase] - bytes_said) <= _WITHIN * bytes_said
            assert near, f"{problem}, the ledger says {bytes_said}"


def _traced(subject: MemorySubject, shares: Shares) -> Ledger:
    with on_meta():
        model = ConvNet(CONFIG)
    around = partial(_around, subject, shares)
    return TracedModel(model, _batch, _loss, blocks=model.blocks, around=around).ledger(_ROWS)


def _around(
    subject: MemorySubject, shares: Shares, model: nn.Module, works_in: Callable[[Scratch], None]
) -> AbstractContextManager[object]:
    return ForeseenActivations(small(subject), model, shares, works_in).context()


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    images = torch.zeros(rows, CONFIG.channels, CONFIG.size, CONFIG.size)
    return images, torch.zeros(rows, dtype=torch.int64)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
