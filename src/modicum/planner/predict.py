"""What a run would take: ledgers of model, adapter and optimizer, added up for one choice."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from modicum.adapters.base import Adapter
from modicum.adapters.head_blocks import note_fused_heads
from modicum.adapters.preparation import Preparation
from modicum.adapters.travel import Travel, travel_of
from modicum.compress.base import Compressor
from modicum.core.contracts.ledger import (
    ALWAYS,
    PHASES,
    ClassTreatment,
    Entry,
    Ledger,
    ModelQuery,
    Phase,
    Wire,
)
from modicum.core.contracts.optimizers import OptimizerMethod
from modicum.core.contracts.parameters import trained_shapes
from modicum.core.errors import InputError
from modicum.core.layers.meta import on_meta
from modicum.core.layers.saved_tensors import Shares
from modicum.core.layers.small_forms import larger_forms
from modicum.core.machine.kernels import library_bytes
from modicum.core.ranks.layout import Layout
from modicum.core.units import Every
from modicum.linears.base import LinearMethod
from modicum.memory.base import ActivationPolicy
from modicum.models.traced_ledger import experts_of
from modicum.parallel.ledger import staging
from modicum.planner.left_out import left_out_by
from modicum.planner.length import steps_without_data
from modicum.planner.sharing import (
    Model,
    Structure,
    coding_flops,
    owed_bytes,
    sent_dense,
    shared,
)
from modicum.planner.traced import traces
from modicum.planner.updates import (
    narrow_matrices,
    one_after_the_other,
    spent_in_updates,
    thin_matrices,
    treated,
)
from modicum.recipe import Recipe
from modicum.tasks import AnyTask, task_of
from modicum.tasks.traced import passes_of

ALONE = Layout()


@dataclass(frozen=True)
class Choice:
    """What the planner may choose without changing the arithmetic.

    Args:
        micro_batch_size, micro_batches: of each rank.
        recompute: whether blocks run again in the backward pass.
        layout: how the ranks share the work.
        asynchronous: whether checkpoints are copied in memory and written while training continues.
        shares: what a policy on saved activations was seen to leave of them; None: not seen yet.
    """

    micro_batch_size: int
    micro_batches: int
    recompute: bool
    layout: Layout = ALONE
    asynchronous: bool = False
    shares: Shares | None = None

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
        total, trainable: elements of the full model and its adapters.
        frozen_bytes: of weights that are read once and never change.
        half: whether matrix products are in bf16.
        traced: whether the model's part is traced; if not, it is arithmetic.
        travel: where the adapter can be used outside of modicum; None: there is none.
        narrow: layers that the adapter's rank is above the smaller width of, with the largest
            rank that fits them.
        treated: what the optimizer does with each class of parameters, if not the same.
        sent_dense: trained tensors of which a method of `comm` sends the numbers themselves, with
            how many they are.
        narrow_matrices: those narrower than the optimizer's rank, with their smaller width.
        coding_flops: by which a method of `comm` makes what an update sends; not among `flops`.
        thin_matrices: those of which the optimizer's density rounds to nothing, with their parts.
        larger_forms: layers whose form takes more bytes than a dense weight, with how many times
            as many.
        positions: of a micro-batch.
        built: layers whose adapter chooses by `positions` whether its change is built, forward and
            backward, with what it chooses.
        update_wires: of the ledger's calls the last ones, which the optimizer makes in its update.
        left_out: by section of the recipe, matrices that its `targets` leave out, with the reasons.
    """

    choice: Choice
    ledger: Ledger
    total: int
    trainable: int
    frozen_bytes: int
    half: bool
    traced: bool = False
    travel: Travel | None = None
    narrow: Mapping[str, int] = field(default_factory=dict)
    treated: tuple[ClassTreatment, ...] = ()
    sent_dense: Mapping[str, int] = field(default_factory=dict)
    narrow_matrices: Mapping[str, int] = field(default_factory=dict)
    coding_flops: int = 0
    thin_matrices: Mapping[str, int] = field(default_factory=dict)
    larger_forms: Mapping[str, float] = field(default_factory=dict)
    positions: int = 0
    built: Mapping[str, tuple[bool, bool]] = field(default_factory=dict)
    update_wires: tuple[Wire, ...] = ()
    left_out: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """Tensor bytes at the peak."""
        return self.ledger.peak()

    @property
    def flops(self) -> int:
        """Of an update: every micro-batch's forward and backward pass, and the step."""
        step = self.ledger.flops("step")
        return (self.ledger.flops() - step) * self.choice.micro_batches + step

    @property
    def wire_bytes(self) -> int:
        """Bytes that the rank sends in an update, around a ring."""
        return sum(wire.bytes for wire in self.ledger.wire)

    def wire_rows(self) -> list[dict[str, Any]]:
        """The same by collective and axis, with the calls that there are in an update."""
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        for wire in self.ledger.wire:
            named = {"collective": wire.collective, "axis": wire.axis}
            row = rows.setdefault((wire.collective, wire.axis), {**named, "bytes": 0, "calls": 0})
            row["bytes"] += wire.bytes
            row["calls"] += wire.count
        return list(rows.values())

    @property
    def host_bytes(self) -> int:
        """Bytes in addition to the device's: of what is staged for checkpoints."""
        return sum(entry.bytes for entry in self.ledger.entries if entry.place == "host")

    @property
    def lasting_bytes(self) -> int:
        """Tensor bytes that are there in every phase: weights, and the optimizer's state."""
        there = [entry for entry in self.ledger.entries if entry.phases == ALWAYS]
        return sum(entry.bytes for entry in there if entry.place == "device")

    def process_bytes(self, base: int, kept: float, *, staged: bool = True) -> int:
        """The process's resident size at its largest.

        Args:
            base: what it holds before the first tensor.
            kept: bytes that the allocator keeps next to each byte of tensors that come and go.
            staged: whether a checkpoint is still being written then, from a copy of the state.
        """
        return max(self.process_by_phase(base, kept, staged=staged))

    def process_by_phase(self, base: int, kept: float, *, staged: bool = True) -> tuple[int, ...]:
        """The same, for each phase in which large tensors come and go.

        Of what comes and goes, small blocks take what they took in their worst phase: the C library
        keeps those pages when they are free, and with holes between them. A large tensor is mapped
        on its own, and given back when it is free. What is always there has no holes.
        """
        host = self.host_bytes if staged else 0
        holes = round(self.small_bytes * kept)
        steady = base + host + self.lasting_bytes + self.small_bytes + holes
        return tuple(steady + self._mapped_bytes(phase) for phase in PHASES)

    @property
    def small_bytes(self) -> int:
        """Bytes in tensors that come and go and are not mapped on their own, in the worst phase."""
        return max(sum(entry.small for entry in self._passing(phase)) for phase in PHASES)

    def _mapped_bytes(self, phase: Phase) -> int:
        """Bytes in tensors that come and go and are mapped on their own."""
        return sum(min(entry.large, entry.bytes) for entry in self._passing(phase))

    def _passing(self, phase: Phase) -> list[Entry]:
        """What is on the device in a phase, and not in all."""
        entries = [entry for entry in self.ledger.entries if entry.place == "device"]
        return [e for e in entries if phase in e.phases and e.phases != ALWAYS]


def predict(
    recipe: Recipe,
    config: Any,
    choice: Choice,
    device: str = "cpu",
    prepared: Mapping[str, Mapping[str, Any]] | None = None,
) -> Prediction:
    """What a recipe's update takes under a choice; `prepared` as of `Predictor`."""
    return Predictor(device, prepared)(recipe, config, choice)


class Predictor:
    """Predictions for a recipe and variations of it; what they have in common is done once.

    Args:
        device: where the run is, cpu or cuda.
        prepared: by layer, what the adapter found out from data; None: nothing yet, and it is
            counted at its bound.
        traces: whether models may be traced, which takes seconds each; if not, a recipe that
            arithmetic does not know is refused.
    """

    def __init__(
        self,
        device: str = "cpu",
        prepared: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        traces: bool = True,
    ) -> None:
        self._device, self._prepared, self._traces = device, prepared or {}, traces
        self._structures: dict[str, list[tuple[Any, Structure]]] = {}

    def without_traces(self) -> Predictor:
        """The same predictor, for recipes that arithmetic knows; it refuses the others."""
        other = Predictor(self._device, self._prepared, traces=False)
        other._structures = self._structures
        return other

    def __call__(self, recipe: Recipe, config: Any, choice: Choice) -> Prediction:
        """What a rank's step takes; where layers take another form later, at the most."""
        each = [self._of(recipe, one, choice) for one in (config, *_later(recipe, config))]
        return max(each, key=lambda prediction: prediction.peak_bytes)

    def _of(self, recipe: Recipe, config: Any, choice: Choice) -> Prediction:
        """Add up the ledgers of everything that the recipe puts into a rank's step."""
        task, half = task_of(recipe), recipe.training.precision == "bf16"
        frozen_half = half and recipe.adapter is not None
        shape = replace(
            task.row(recipe),
            sequences=choice.micro_batch_size * passes_of(recipe),
            micro_batches=choice.micro_batches,
            weight_bytes=2 if frozen_half else 4,
            compute_bytes=2 if half else 4,
            residual_bytes=2 if frozen_half else 4,
            device=self._device,
        )
        structure, shares = (
            self._structure(recipe, config),
            choice.shares or _expected_shares(recipe, shape),
        )
        backward = needs_gradients(recipe)
        model = Model(task, config, structure, shape, choice.recompute, shares, backward)
        # The arithmetic also refuses what the task does not go with. It knows blocks and layers.
        known = model.by_arithmetic is not None and not structure.beyond_arithmetic
        if not known or recipe.budget.ledger == "traced":
            if not self._traces:
                raise InputError("its ledger would have to be traced", field="budget.ledger")
            found = traces(
                recipe, config, shape, self._device, structure.experts, shares, self._prepared
            )
            model = replace(model, traces=found)
        parts, ledger = model.parts(choice.layout), model.ledger()
        if choice.layout.ranks > 1:
            ledger = shared(model, ledger, parts, recipe)
        state = spent_in_updates(recipe, model, choice.layout)
        if choice.asynchronous and not _saved_at_the_end_alone(recipe, task):
            moments = state.bytes("optimizer")
            owed = owed_bytes(recipe, structure, choice.layout)
            ledger += staging(parts.trained_parts, moments, choice.layout.replicas, owed=owed)
        trainable, total = model.structure.trainable, config.parameter_count()
        if recipe.adapter is not None:
            total += trainable
        frozen = parts.frozen_bytes if recipe.adapter is not None else 0
        traced = model.traces is not None
        library = Entry("buffer", library_bytes(self._device), ALWAYS, "cuBLAS's workspaces")
        # What a strategy sends before and after an update is gone while the update works.
        spent = one_after_the_other(ledger, state) + Ledger.of(library)
        return Prediction(
            choice, spent, total, trainable, frozen, half, traced, structure.travel,
            structure.narrow, treated(recipe, model), sent_dense(recipe, structure, choice.layout),
            narrow_matrices(recipe, model),
            coding_flops(recipe, structure, choice.layout),
            thin_matrices(recipe, model), structure.larger_forms, shape.positions,
            structure.built(shape.positions), state.wire, structure.left_out,
        )  # fmt: skip

    def adapted_layers(self, recipe: Recipe, config: Any) -> list[str]:
        """The last names of the layers that the recipe's adapter changes, in order."""
        sites = self._structure(recipe, config).sites
        return list(dict.fromkeys(site.name.rpartition(".")[2] for site in sites))

    def _structure(self, recipe: Recipe, config: Any) -> Structure:
        """What is trained, and the adapter with the layers that its targets name.

        Raises:
            InputError: a target names no layer.
        """
        seed = recipe.training.seed if recipe.adapter is not None else None
        sections = recipe.task, recipe.adapter, recipe.compress, recipe.linear, recipe.plugins
        key = json.dumps([*sections, seed, _reads_heads(recipe)], sort_keys=True)
        known = self._structures.setdefault(key, [])
        for other, structure in known:
            if other is config or other == config:
                return structure
        known.append((config, _structure(recipe, config, self._prepared)))
        return known[-1][1]


def needs_gradients(recipe: Recipe) -> bool:
    """Whether updates are made of a backward pass."""
    made_by = recipe.methods()["optimizer"].traits(recipe.fields("optimizer"))
    return "needs_no_gradients" not in made_by


def _reads_heads(recipe: Recipe) -> bool:
    """Whether the optimizer wants the heads in fused layers."""
    optimizer = recipe.method("optimizer")
    return isinstance(optimizer, OptimizerMethod) and optimizer.reads_heads


def _structure(recipe: Recipe, config: Any, prepared: Mapping[str, Mapping[str, Any]]) -> Structure:
    with on_meta():
        model = task_of(recipe).model(config)
        if _reads_heads(recipe):
            note_fused_heads(model)
        adapter, experts = recipe.method("adapter"), experts_of(model)
        left = left_out_by(recipe, model)
        if adapter is None:
            if isinstance(compressor := recipe.method("compress"), Compressor):
                compressor.freeze(model)
            frozen = not all(parameter.requires_grad for parameter in model.parameters())
            larger = larger_forms(model)
            trained = trained_shapes(model)
            return Structure(
                trained, experts=experts, freezes=frozen, larger_forms=larger, left_out=left
            )
        assert isinstance(adapter, Adapter)
        try:
            found = Preparation(prepared)
            attached = adapter.attach(model, seed=recipe.training.seed, prepared=found)
        except InputError as error:
            raise error.within("adapter") from None
        sites, travel = tuple(attached.sites.values()), travel_of(attached)
    left["adapter"] = attached.left_out
    return Structure(trained_shapes(model), adapter, sites, experts, travel, left_out=left)


def _later(recipe: Recipe, config: Any) -> Iterator[Any]:
    """The model's configuration with the forms that its layers take while the run goes."""
    linear, now = recipe.method("linear"), getattr(config, "forms", None)
    if now is None or not isinstance(linear, LinearMethod):
        return
    if (later := linear.later(now)) != now:
        yield replace(config, forms=later)


def _saved_at_the_end_alone(recipe: Recipe, task: AnyTask) -> bool:
    """Whether the only checkpoint is surely the last, which takes no copy of the state."""
    update = recipe.training.batch_size * task.row(recipe).positions
    every, steps = recipe.checkpoint.every, steps_without_data(recipe.training, update)
    if every == "auto" or steps is None or recipe.evaluation.keep_best:
        return False
    interval = Every.parse(every).steps
    return interval is not None and interval >= steps


def _expected_shares(recipe: Recipe, shape: ModelQuery) -> Shares | None:
    """What the recipe's policy on saved activations is expected to leave of them."""
    policy = recipe.method("memory")
    if policy is None:
        return None
    assert isinstance(policy, ActivationPolicy)
    return policy.shares(shape.compute_bytes).expected
