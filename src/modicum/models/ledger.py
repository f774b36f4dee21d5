"""What the built-in decoder spends, by arithmetic: weights, saved activations, workspace, work.

The counts follow `llama.py`, `mixers.py` and `mlps.py` line by line; a test holds them against the
tensors that autograd really saves, the peak that the meter sees and PyTorch's own FLOP counter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from modicum.core.ledger import ALWAYS, Entry, Ledger, Phase, Shape, Work
from modicum.models.config import ModelConfig

_TRAINING: tuple[Phase, ...] = ("forward", "loss", "backward")
_UNTIL_BACKWARD: tuple[Phase, ...] = ("forward", "loss")


@dataclass(frozen=True)
class Adapted:
    """What adapters on a frozen decoder change of what it keeps for the backward pass.

    Args:
        sites: bytes that the adapter of each layer keeps, by the layer's full name.
        inputs: of those layers, the ones whose input is kept for their adapter.
    """

    sites: Mapping[str, int] = field(default_factory=dict)
    inputs: frozenset[str] = frozenset()

    def within(self, block: str) -> Adapted:
        """The sites of one block, named from there."""
        prefix = f"{block}."
        sites = {n.removeprefix(prefix): b for n, b in self.sites.items() if n.startswith(prefix)}
        return Adapted(sites, frozenset(name for name in sites if prefix + name in self.inputs))


def ledger(
    config: ModelConfig, shape: Shape, *, adapted: Adapted | None = None, recompute: bool = False
) -> Ledger:
    """The decoder's ledger at the shape of a micro-batch, without gradients that stay.

    Phases in which memory can peak at several moments stand for the worst of them: `loss` for the
    backward pass of cross-entropy, of the head and of the last block, `backward` for that of the
    first block and of the embedding.

    Args:
        adapted: the frozen decoder's adapters; None where every weight is trained.
        recompute: whether blocks keep their input alone and run again in the backward pass.
    """
    spent = _Spent(config, shape, adapted)
    recomputed = [block.saved and (spent.stream if recompute else 0) for block in spent.blocks]
    kept = [
        stream if stream and recompute else block.saved
        for stream, block in zip(recomputed, spent.blocks, strict=True)
    ]
    weights = config.parameter_count() * shape.weight_bytes
    saved = sum(kept) + spent.last_norm
    first = next((block for block in spent.blocks if block.saved), spent.blocks[-1])
    last = spent.blocks[-1]
    again = last.saved if recompute else 0
    casts = spent.casts
    evaluation = 2 * spent.logits + spent.logits_cast
    first_saved = first.saved + (spent.stream if recompute else 0)
    return Ledger.of(
        Entry("weight", weights, what="model"),
        Entry("activation", saved, _UNTIL_BACKWARD, "activations"),
        Entry("activation", first_saved, ("backward",), "activations of a block"),
        Entry("workspace", max(evaluation, spent.streaming), ("evaluation",), "logits"),
        Entry("workspace", max(evaluation, 2 * spent.stream), ("forward",), "logits"),
        Entry(
            "workspace",
            max(
                3 * spent.logits,
                spent.logits + spent.head_gradient + spent.stream,
                again + last.work + spent.head_gradient - spent.last_norm,
            ),
            ("loss",),
            "logits and gradients",
        ),
        Entry(
            "workspace",
            max(
                first.work - spent.gradients_to_come(first),
                spent.embedding_gradients - first_saved,
                0,
            ),
            ("backward",),
            "gradients of activations",
        ),
        Entry("workspace", sum(casts), ("evaluation", "forward", "loss"), "weights in bf16"),
        Entry("workspace", casts[0], ("backward",), "weights in bf16"),
        Entry("buffer", _sequence_bytes(config, shape), (*_TRAINING, "evaluation"), "masks"),
        Entry("buffer", _batch_bytes(shape), _TRAINING, "tokens"),
        *_work(spent, shape, recompute),
    )
