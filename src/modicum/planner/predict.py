"""What a run would take: ledgers of model, adapter and optimizer, added up for one choice."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache

from modicum.adapters.base import Adapter
from modicum.adapters.sites import Site, choose
from modicum.core.errors import InputError
from modicum.core.layout import Layout
from modicum.core.ledger import Ledger, Shape
from modicum.core.meta import on_meta
from modicum.models.config import ModelConfig
from modicum.models.llama import Llama
from modicum.parallel.ledger import staging
from modicum.planner.sharing import Model, shared
from modicum.recipe import Recipe

# What a process on a CPU holds beyond what it held when the plan was made, as measured by
# benchmarks/prediction.py. Once: the modules that torch loads for its first optimizer, the
# tokenizer and the text it was trained on, kernels' code and scratch. A byte of tensors that come
# and go: itself, and the free blocks between them that the C allocator keeps and cannot use for
# others. Many of those come with the first tensors, by whether weights are frozen and products in
# bf16: glibc before 2.38 seldom reuses aligned blocks, and adapters make many small ones.
PROCESS_ONCE = 175 * 10**6
PROCESS_FACTOR = 1.35
FIRST_BYTES = 200 * 10**6
FIRST_FACTOR = {
    (False, False): 0.9,
    (False, True): 0.6,
    (True, False): 2.2,
    (True, True): 1.4,
}
# A matrix product of a whole training step runs at about this part of a large one's rate.
EFFICIENCY = 0.65
ALONE = Layout()


@dataclass(frozen=True)
class Choice:
    """What the planner may choose without changing the arithmetic.

    Args:
        micro_batch_size, micro_batches: of each rank.
        recompute: whether blocks run again in the backward pass.
        layout: how the ranks share the work.
        asynchronous: whether checkpoints are copied in memory and written while training goes on.
    """

    micro_batch_size: int
    micro_batches: int
    recompute: bool
    layout: Layout = ALONE
    asynchronous: bool = False

    @classmethod
    def of(
        cls, batch_size: int, size: int, recompute: bool, layout: Layout, asynchronous: bool
    ) -> Choice:
        """The choice with micro-batches of at most `size` that make a rank's share of the batch.

        >>> Choice.of(10, 2, False, Layout(replicas=4), False).micro_batches
        2
        """
        share = -(-batch_size // layout.ranks)
        size = min(size, share)
        return cls(size, -(-share // size), recompute, layout, asynchronous)


@dataclass(frozen=True)
class Prediction:
    """Bytes and work of one rank in an update, under a choice.

    Args:
        total, trainable: elements of the whole model and its adapters.
        frozen_bytes: of weights that are read once and never change.
        half: whether matrix products are in bf16.
    """

    choice: Choice
    ledger: Ledger
    total: int
    trainable: int
    frozen_bytes: int
    half: bool

    @property
    def peak_bytes(self) -> int:
        """Tensor bytes at the peak."""
        return self.ledger.peak()

    @property
    def flops(self) -> int:
        """Of an update: every micro-batch's forward and backward pass."""
        return self.ledger.flops() * self.choice.micro_batches

    @property
    def wire_bytes(self) -> int:
        """Bytes that the rank sends in an update, around a ring."""
        return sum(wire.bytes for wire in self.ledger.wire)

    @property
    def host_bytes(self) -> int:
        """Bytes beside the device's: of what is staged for checkpoints."""
        return sum(entry.bytes for entry in self.ledger.entries if entry.place == "host")

    def process_bytes(self, base: int) -> int:
        """The process's resident size at the peak, when it held `base` before the first tensor."""
        moving = self.peak_bytes - self.frozen_bytes
        kept = moving * PROCESS_FACTOR
        kept += min(moving, FIRST_BYTES) * FIRST_FACTOR[self.frozen_bytes > 0, self.half]
        # What is staged stays where it is, so nothing is lost between its blocks.
        return base + PROCESS_ONCE + self.frozen_bytes + self.host_bytes + round(kept)


def predict(recipe: Recipe, config: ModelConfig, choice: Choice) -> Prediction:
    """What a recipe's update takes under a choice."""
    return Predictor()(recipe, config, choice)


class Predictor:
    """Predictions for a recipe and variations of it; what they have in common is done once."""

    def __init__(self) -> None:
        self._adapters: dict[tuple[str, _Key], tuple[Adapter, list[Site]]] = {}

    def __call__(self, recipe: Recipe, config: ModelConfig, choice: Choice) -> Prediction:
        """Add up the ledgers of everything that the recipe puts into a rank's step."""
        half = recipe.training.precision == "bf16"
        frozen_half = half and recipe.adapter is not None
        shape = Shape(
            sequences=choice.micro_batch_size,
            tokens=recipe.data.sequence_length,
            micro_batches=choice.micro_batches,
            weight_bytes=2 if frozen_half else 4,
            compute_bytes=2 if half else 4,
            residual_bytes=2 if frozen_half else 4,
            # A batch of rows with one document each has no mask; the worst batch counts.
            segments=recipe.data.boundaries,
        )
        adapted = None if recipe.adapter is None else self._adapter(recipe, config)
        total = trainable = config.parameter_count()
        frozen = 0
        if adapted is not None:
            adapter, sites = adapted
            alike = Counter(replace(site, name="") for site in sites)
            trainable = sum(adapter.trained(site) * count for site, count in alike.items())
            frozen = total * shape.weight_bytes
            total += trainable
        model = Model(config, adapted, shape, choice.recompute)
        parts, ledger = model.parts(choice.layout), model.ledger()
        if choice.layout.ranks > 1:
            ledger = shared(model, ledger, parts, recipe.parallel)
        if choice.layout.shards > 1:
            frozen = parts.frozen_bytes
        if choice.asynchronous:
            ledger += staging(parts.trained_parts, choice.layout.replicas)
        return Prediction(choice, ledger, total, trainable, frozen, half)

    def _adapter(self, recipe: Recipe, config: ModelConfig) -> tuple[Adapter, list[Site]]:
        """The recipe's adapter and the layers that its targets name.

        Raises:
            InputError: a target names no layer.
        """
        key = json.dumps([recipe.adapter, recipe.plugins], sort_keys=True), _Key(config)
        if key not in self._adapters:
            adapter = recipe.method("adapter")
            assert isinstance(adapter, Adapter)
            try:
                sites = choose(_on_meta(_Key(config)), adapter.targets, adapter.exclude)
            except InputError as error:
                raise error.within("adapter") from None
            self._adapters[key] = adapter, sites
        return self._adapters[key]


class _Key:
    """A configuration as a dictionary key: by what decides the model's modules."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def __hash__(self) -> int:
        return hash((self.config.layers, self.config.width, self.config.vocabulary_size))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.config == other.config


@cache
def _on_meta(key: _Key) -> Llama:
    with on_meta():
        return Llama(key.config)
