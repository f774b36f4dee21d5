"""Delayed recall, and digits row by row: a recurrent net by ADMM, and by gradients through time.

All arms begin with the same weights, see the same sequences in full in each update, and are judged
by a forward pass of the net itself over sequences that none has seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from modicum.core.contracts.step import StepContext
from modicum.core.contracts.strategy import Strategy
from modicum.data.sequences import SequenceBatch
from modicum.models.recurrent import RecurrentConfig, RecurrentNet, create
from modicum.optim import ADMMRNN
from modicum.tasks.sequences import SequenceClasses, SequenceTask

SGD_RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
ADAM_RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
PAIRS = ((1.0, 1.0), (1.0, 3.0), (1.0, 10.0), (1.0, 30.0), (3.0, 3.0), (3.0, 10.0), (10.0, 10.0),
         (10.0, 30.0))  # fmt: skip
SOLVED = 0.99
Train = Callable[[RecurrentNet, SequenceBatch], None]


@dataclass(frozen=True)
class RecallBench:
    """Sequences to train on and to judge by, and a net's shape.

    Args:
        asked: the task.
        seed: of sequences and first weights.
    """

    asked: SequenceClasses
    seed: int = 0

    def result(self, train: Train) -> RecallResult:
        """What a net that this trains does with sequences that it has not seen."""
        task = SequenceTask(self.asked)
        rows, held = task.rows(self.seed)
        assert held is not None
        config = RecurrentConfig(task.channels, self.asked.width, task.classes)
        net = create(config, self.seed)
        before = _norm(net)
        train(net, rows.batch(range(len(rows))))
        batch = held.batch(range(len(held)))
        sums = task.evaluate(net, batch)
        accuracy, loss = (sums[name] / batch.count for name in ("accuracy", "loss"))
        return RecallResult(accuracy, loss, _norm(net) / before)


@dataclass(frozen=True)
class RecallResult:
    """Held-out accuracy and loss, and by how much the norm of all weights has grown."""

    accuracy: float
    loss: float
    growth: float


def _norm(net: nn.Module) -> float:
    return float(torch.nn.utils.get_total_norm(list(net.parameters())))


def by_admm(value: ADMMRNN, updates: int) -> Train:
    """Full-batch updates of the method's own step program."""

    def train(net: RecurrentNet, batch: SequenceBatch) -> None:
        task = SequenceTask(SequenceClasses())
        program = value.bind_step(
            StepContext(net, 0, task=task, strategy=Strategy(), groups=lambda decay: [])
        )
        for step in range(1, updates + 1):
            program(step, [batch], batch.count, lambda: None)

    return train


def through_time(
    kind: Callable[..., torch.optim.Optimizer],
    rate: float,
    updates: int,
    *,
    clip: float | None = None,
    only_head: bool = False,
    **fields: Any,
) -> Train:
    """Full-batch updates by back-propagation through time.

    Args:
        clip: the largest norm of all gradients.
        only_head: the recurrent layer stays as it begins.
    """

    def train(net: RecurrentNet, batch: SequenceBatch) -> None:
        net.blocks.requires_grad_(not only_head)
        trained = [p for p in net.parameters() if p.requires_grad]
        optimizer = kind(trained, lr=rate, **fields)
        for _ in range(updates):
            logits = net(batch.inputs, batch.last)
            nn.functional.cross_entropy(logits, batch.labels).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(trained, clip)
            optimizer.step()
            optimizer.zero_grad()

    return train
