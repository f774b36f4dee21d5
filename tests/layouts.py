"""A decoder that is awkward to divide, and the layouts of ranks in which tests train it."""

from __future__ import annotations

from modicum.core.contracts.strategy import Strategy
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.ranks import Ranks
from modicum.models.config import ModelConfig
from modicum.parallel.replicated import Replicated
from modicum.parallel.sharded import Sharded
from modicum.parallel.zero import Zero

# Widths that no number of ranks divides. One key head gives a matrix k of two rows, so that with
# three ranks or four some hold none of it.
CONFIG = ModelConfig(
    vocabulary_size=29, width=6, layers=2, heads=3, kv_heads=1, mlp_width=13, initializer_range=0.3
)
# name: (ranks, ranks that share one copy of the weights)
LAYOUTS = {
    "alone": (1, 1),
    "ddp 2": (2, 1),
    "ddp 4": (4, 1),
    "fsdp 2": (2, 2),
    "fsdp 3": (3, 3),
    "fsdp 4": (4, 4),
    "hybrid 4": (4, 2),
}


def strategy_of(ranks: Ranks, layout: str) -> Strategy:
    """How these ranks share gradients and weights in the layout of that name, or in `zero 2`."""
    if layout == "zero 2":
        return Zero(ranks)
    count, shard = LAYOUTS[layout]
    assert count == ranks.size
    if count == 1:
        return Strategy(ranks)
    if shard == 1:
        return Replicated(ranks, Layout.of(count), bucket_bytes=1000)
    return Sharded(ranks, Layout.of(count, shard))
