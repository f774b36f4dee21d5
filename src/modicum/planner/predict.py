"""What a run would take: ledgers of model, adapter and optimizer, added up for one choice."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache

from modicum.adapters.base import Adapter, Placement
from modicum.adapters.sites import Site, choose
from modicum.core.errors import InputError
from modicum.core.ledger import Ledger, Shape
from modicum.core.meta import on_meta
from modicum.models.config import ModelConfig
from modicum.models.ledger import Adapted, optimizer_ledger
from modicum.models.ledger import ledger as model_ledger
from modicum.models.llama import Llama
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


@dataclass(frozen=True)
class Choice:
    """What the planner may choose without changing the arithmetic."""

    micro_batch_size: int
    micro_batches: int
    recompute: bool


@dataclass(frozen=True)
class Prediction:
    """Bytes and work of one update under a choice.

    Args:
        total, trainable: elements of the model and its adapters.
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

    def process_bytes(self, base: int) -> int:
        """The process's resident size at the peak, when it held `base` before the first tensor."""
        moving = self.peak_bytes - self.frozen_bytes
        kept = moving * PROCESS_FACTOR
        kept += min(moving, FIRST_BYTES) * FIRST_FACTOR[self.frozen_bytes > 0, self.half]
        return base + PROCESS_ONCE + self.frozen_bytes + round(kept)


def predict(recipe: Recipe, config: ModelConfig, choice: Choice) -> Prediction:
    """What a recipe's update takes under a choice."""
    return Predictor()(recipe, config, choice)


class Predictor:
    """Predictions for a recipe and variations of it; what they have in common is done once."""

    def __init__(self) -> None:
        self._adapters: dict[tuple[str, _Key], tuple[Adapter, list[Site]]] = {}

    def __call__(self, recipe: Recipe, config: ModelConfig, choice: Choice) -> Prediction:
        """Add up the ledgers of everything that the recipe puts into a step."""
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
        total = trainable = config.parameter_count()
        frozen = 0
        if recipe.adapter is None:
            parts = [model_ledger(config, shape, recompute=choice.recompute)]
        else:
            adapter, sites = self._adapter(recipe, config)
            alike = Counter(replace(site, name="") for site in sites)
            trainable = sum(adapter.trained(site) * count for site, count in alike.items())
            frozen = total * shape.weight_bytes
            total += trainable
            parts = _adapted(adapter, sites, config, shape, choice.recompute)
        parts.append(optimizer_ledger(trainable, shape))
        return Prediction(choice, Ledger.sum(parts), total, trainable, frozen, half)

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


def _adapted(
    adapter: Adapter, sites: list[Site], config: ModelConfig, shape: Shape, recompute: bool
) -> list[Ledger]:
    """The ledgers of a frozen model and of its adapters.

    What adapters keep for the backward pass is the model's to add up: it knows which blocks have
    run, and which are run again.
    """
    alike = {replace(site, name="") for site in sites}
    ledgers = {site: adapter.ledger(Placement(site, shape)) for site in alike}
    kept = {site: each.bytes("activation") for site, each in ledgers.items()}
    rest = {
        site: each.map_entries(lambda entry: None if entry.kind == "activation" else entry)
        for site, each in ledgers.items()
    }
    adapted = Adapted(
        sites={site.name: kept[replace(site, name="")] for site in sites},
        inputs=frozenset(site.name for site in sites if adapter.saves_input(site)),
    )
    return [
        model_ledger(config, shape, adapted=adapted, recompute=recompute),
        *(rest[replace(site, name="")] for site in sites),
    ]


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
