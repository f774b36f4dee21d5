"""The testbed on which adapters are compared: a pretrained decoder, and a change to be learned.

The model learns four modes of a source of permutations; then the permutations of two of them are
replaced, and a contender has some hundred steps to learn these without losing the others. The
entropy of the source is known, so a loss is reported as its excess over that floor.

The decoder is modicum's own, with rotary positions (the published reference figures of this testbed
were taken with learned ones, so its loss bars are measured anew here). Embeddings and head are
frozen for adapters; full tuning trains everything.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from modicum.adapters.base import Adapter
from modicum.core.contracts.hooks_in_order import RunHooks
from modicum.core.contracts.parameters import count, trainable
from modicum.core.known_outcomes import described
from modicum.core.machine.memory import TensorMeter, bytes_by_kind
from modicum.core.random import derive_seed
from modicum.models import ModelConfig, create
from modicum.models.llama import Llama
from modicum.proofs.base import ProofRun
from modicum.proofs.bench.permutations import MODES, PermutationSource
from modicum.proofs.bench.sweep import Sweep, Swept
from modicum.proofs.bench.training import Hook, RateSchedule, train

CHANGED, CLIP, BATCH = 2, 1.0, 32
PREPARED_FROM = 16  # batches, for adapters that look at data first
SCHEDULE = RateSchedule(20, "line", last=0.1)
PRETRAINING_RATE = 3e-3
# Both sides' best lies in these: tried were 3e-4 to 1e-2 for full tuning and 3e-3 to 1e-1 for LoRA
# of rank 1 to 4, at both sizes.
ADAPTER_RATES = (1e-2, 3e-2, 6e-2)
FULL_TUNING_RATES = (1e-3, 3e-3, 1e-2)


@dataclass(frozen=True)
class PermutationSize:
    """How large the experiment is: symbols, tokens a sequence, the decoder, steps."""

    symbols: int
    tokens: int
    blocks: int
    width: int
    mlp_width: int
    heads: int
    pretraining_steps: int
    steps: int

    @property
    def model(self) -> ModelConfig:
        """The decoder, whose vocabulary is the symbols and the modes."""
        return ModelConfig(
            vocabulary_size=self.symbols + MODES,
            width=self.width,
            layers=self.blocks,
            heads=self.heads,
            mlp_width=self.mlp_width,
            context=self.tokens,
        )

    @property
    def floor(self) -> float:
        """The entropy of a symbol given the ones before it, in nats."""
        return PermutationSource(self.symbols, self.tokens).floor


QUICK = PermutationSize(
    32, 20, blocks=2, width=64, mlp_width=160, heads=2, pretraining_steps=600, steps=200
)
FULL = PermutationSize(
    64, 40, blocks=4, width=96, mlp_width=256, heads=4, pretraining_steps=1500, steps=300
)


@dataclass(frozen=True)
class FullTuning:
    """The baseline in an adapter's place: every parameter is trained."""


TuningContender = Adapter | FullTuning


@dataclass(frozen=True)
class Tuned:
    """What one fine-tuning run ended with.

    Args:
        excess: held-out loss over the entropy floor, in nats a token.
        trained: parameters that were trained.
        state_bytes: bytes of gradients and optimizer state.
        peak_bytes: of tensors during one step, the model's own included.
    """

    excess: float
    trained: int
    state_bytes: int
    peak_bytes: int


class PermutationBench:
    """The task, quick or full as the proof's run is; the base model is pretrained on first use.

    Args:
        quick: how large a quick experiment is, for methods that need another than the usual.
        prepared_from: batches that there are for adapters that look at data first.
    """

    __test__ = False  # its name is no invitation to pytest

    def __init__(
        self,
        run: ProofRun,
        quick: PermutationSize | None = None,
        *,
        prepared_from: int = PREPARED_FROM,
    ) -> None:
        self.prepared_from = prepared_from
        self.size = FULL if run.full else quick or QUICK
        self.seeds: tuple[int, ...] = (0, 1, 2) if run.full else (0, 1)
        run.seeds = self.seeds
        self.progress = run.progress
        self.source = PermutationSource(self.size.symbols, self.size.tokens)
        self.old = self.source.table(seed=0)
        shared = {"bench": "permutations", "size": self.size}
        self.sweep = Sweep(run, self.tune, _excess_of, chosen_by="first", shared=shared, kind=Tuned)

    @cached_property
    def base(self) -> Llama:
        """The decoder that knows the old permutations."""
        self.progress("pretraining")
        model = create(self.size.model, seed=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=PRETRAINING_RATE, weight_decay=0.0)
        self.fit(model, optimizer, self.old, self.size.pretraining_steps, 0)
        return model

    def new(self, seed: int) -> Tensor:
        """The permutations [modes, symbols] that the seed's fine-tuning is to learn."""
        changed = self.source.table(seed=1000 + seed)
        return torch.cat([changed[:CHANGED], self.old[CHANGED:]])

    def tune(self, contender: TuningContender, learning_rate: float, seed: int = 0) -> Tuned:
        """Fine-tune a copy of the base model."""
        model, table, hooks = copy.deepcopy(self.base), self.new(seed), RunHooks()
        if not isinstance(contender, FullTuning):
            looked_at = _generator("prepared from", seed)
            batches = (
                self.source.batch(table, looked_at, BATCH) for _ in range(self.prepared_from)
            )
            attached = contender.attach(
                model, seed=seed, batches=batches, loss=self.source.loss_sum
            )
            hooks.add("adapter", contender.run_hook(attached))
        parameters = [parameter for _, parameter in trainable(model)]
        optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
        self.fit(model, optimizer, table, self.size.steps, 1 + seed, hooks)
        with TensorMeter("cpu") as meter:
            tokens = self.source.batch(table, _generator("one step", seed), BATCH)
            self.source.loss(model, tokens).backward()
            optimizer.step()
        kinds = bytes_by_kind(model, optimizer)
        return Tuned(
            self.source.excess(model, table),
            count(model)[1],
            kinds["gradient"] + kinds["optimizer"],
            (meter.peak or 0) + kinds["weight"] + kinds["optimizer"],
        )

    def best(
        self,
        contender: TuningContender,
        rates: Sequence[float] | None = None,
        *,
        baseline: bool = False,
    ) -> Swept[Tuned]:
        """A contender at the rate that is best from the first seed, from all seeds.

        Args:
            baseline: whether other proofs train it too; full tuning is one always.
        """
        full = isinstance(contender, FullTuning)
        rates = rates or (FULL_TUNING_RATES if full else ADAPTER_RATES)
        name = "full tuning" if full else described(contender)
        return self.sweep.best(name, contender, rates, baseline=baseline or full)

    def fit(
        self,
        model: Llama,
        optimizer: torch.optim.Optimizer,
        table: Tensor,
        steps: int,
        seed: int,
        hooks: RunHooks | None = None,
        modes: range = range(MODES),
        after_update: Hook | None = None,
    ) -> None:
        """Train a model on the permutations of a table; all seeds see other batches."""
        generator = _generator("training", seed)

        def loss(step: int) -> Tensor:
            return self.source.loss(model, self.source.batch(table, generator, BATCH, modes))

        how: Any = {"clip": CLIP, "hooks": hooks, "after_update": after_update}
        train([optimizer], loss, steps, schedule=SCHEDULE, **how)


def _excess_of(tuned: Tuned) -> float:
    return tuned.excess


def _generator(name: str, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(seed, name))
