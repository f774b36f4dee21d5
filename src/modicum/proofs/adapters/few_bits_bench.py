"""The testbed's base in few bits: what adapters learn there, and what merging loses.

The decoder that knows the old permutations (`permutation_bench.py`) is coded by a method of
`linears`, an adapter learns the new ones next to the codes, and is merged. Layers that take its
change as they are keep their codes; others become dense and are coded again by the same method, as
who serves a model in few bits must do.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.base import Adapter
from modicum.adapters.merging import RoundingWarning
from modicum.core.contracts.hooks_in_order import RunHooks
from modicum.core.layers.linear_forms import frozen_linears
from modicum.linears.base import LinearMethod
from modicum.proofs.adapters.permutation_bench import (
    ADAPTER_RATES,
    BATCH,
    PREPARED_FROM,
    PermutationBench,
    PermutationSize,
)
from modicum.proofs.base import ProofRun
from modicum.proofs.bench.sweep import Sweep, Swept


@dataclass(frozen=True)
class OnBase:
    """An adapter, and the form that the base has under it."""

    adapter: Adapter
    base: LinearMethod

    def __repr__(self) -> str:
        return f"{self.adapter!r} on {self.base!r}"


@dataclass(frozen=True)
class TunedInFewBits:
    """What one fine-tuning run ended with.

    Args:
        excess: held-out loss over the entropy floor with the adapter next to the base, in nats a
            token.
        merged: the same after merging, in the base's form again.
        untrained: the same before the first update.
        trained: parameters that were trained.
    """

    excess: float
    merged: float
    untrained: float
    trained: int

    @property
    def lost(self) -> float:
        """What merging costs, in nats a token."""
        return self.merged - self.excess


class FewBitsBench:
    """The task on a base in few bits, quick or full as the proof's run is.

    Args:
        quick: how large a quick experiment is, for methods that need another than the usual.
        seeds: another number of seeds than the testbed's.
        steps: as many updates in a full experiment, where another number than the testbed's.
    """

    def __init__(
        self,
        run: ProofRun,
        quick: PermutationSize | None = None,
        seeds: int | None = None,
        steps: int | None = None,
    ) -> None:
        self.plain = PermutationBench(run, quick)
        if run.full and steps is not None:
            self.plain.size = replace(self.plain.size, steps=steps)
        if seeds is not None:
            self.plain.seeds = run.seeds = tuple(range(seeds))
        shared = {"bench": "permutations in few bits", "size": self.plain.size}
        self.sweep = Sweep(
            run, self.tune, _excess_of, chosen_by="first", shared=shared, kind=TunedInFewBits
        )

    def tune(self, contender: OnBase, learning_rate: float, seed: int = 0) -> TunedInFewBits:
        """Code a copy of the base model, adapt it, and merge."""
        bench, table = self.plain, self.plain.new(seed)
        model = copy.deepcopy(bench.base)
        contender.base.convert(model)
        untrained = bench.source.excess(model, table)
        looked_at = torch.Generator().manual_seed(seed)
        batches = (bench.source.batch(table, looked_at, BATCH) for _ in range(PREPARED_FROM))
        adapter = contender.adapter
        attached = adapter.attach(model, seed=seed, batches=batches, loss=bench.source.loss_sum)
        hooks = RunHooks({"adapter": adapter.run_hook(attached)})
        parameters = list(attached.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
        model.train()
        bench.fit(model, optimizer, table, bench.size.steps, 1 + seed, hooks)
        excess = bench.source.excess(model, table)
        merge_into(attached, contender.base)
        trained = sum(parameter.numel() for parameter in parameters)
        return TunedInFewBits(excess, bench.source.excess(model, table), untrained, trained)

    def best(
        self,
        contender: OnBase,
        rates: Sequence[float] | None = None,
        *,
        baseline: bool = False,
    ) -> Swept[TunedInFewBits]:
        """A contender at the rate that is best from the first seed, from all seeds.

        Args:
            baseline: whether other proofs train it too.
        """
        return self.sweep.best(
            repr(contender), contender, rates or ADAPTER_RATES, baseline=baseline
        )

    def once(
        self, contender: OnBase, rate: float, seed: int, *, baseline: bool = False
    ) -> TunedInFewBits:
        """A contender at one rate, from one seed."""
        return self.sweep.outcome(repr(contender), contender, rate, seed, baseline)


def fold(attached: AttachedAdapter) -> None:
    """Fold an adapter into its base, without a warning: what rounding costs is measured."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RoundingWarning)
        attached.merge(dense=torch.float32)


def merge_into(attached: AttachedAdapter, base: LinearMethod) -> None:
    """Fold an adapter into a base in few bits, and take it off; what became dense is coded anew."""
    model, coded = attached.model, set(frozen_linears(attached.model))
    fold(attached)
    attached.detach()
    dense = tuple(sorted(coded - set(frozen_linears(model))))
    if dense:
        type(base)(**(base.model_dump() | {"targets": dense, "exclude": ()})).convert(model)


def _excess_of(tuned: TunedInFewBits) -> float:
    return tuned.excess
