"""What a run would take: ledgers of model, adapter and optimizer, added up for one choice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from modicum.adapters.base import Adapter
from modicum.adapters.head_blocks import note_fused_heads
from modicum.adapters.preparation import Preparation
from modicum.adapters.travel import travel_of
from modicum.compress.base import Compressor
from modicum.core.contracts.ledger import (
    ALWAYS,
    Entry,
    Ledger,
    ModelQuery,
)
from modicum.core.contracts.optimizers import OptimizerMethod
from modicum.core.contracts.parameters import trained_shapes
from modicum.core.errors import InputError
from modicum.core.layers.meta import on_meta
from modicum.core.layers.saved_tensors import Shares
from modicum.core.layers.small_forms import larger_forms
from modicum.core.machine.kernels import library_bytes
from modicum.core.units import Every
from modicum.linears.base import LinearMethod
from modicum.memory.base import ActivationPolicy
from modicum.models.traced_ledger import experts_of
from modicum.parallel.ledger import staging
from modicum.planner.compression import compression_ledger, known_by
from modicum.planner.left_out import left_out_by, left_out_by_adapter
from modicum.planner.length import steps_without_data
from modicum.planner.prediction import Choice, Prediction
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

T = TypeVar("T")


def predict(
    recipe: Recipe,
    config: Any,
    choice: Choice,
    device: str = "cpu",
    prepared: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    dense: Callable[[Any], Any] | None = None,
) -> Prediction:
    """What a recipe's update takes under a choice; `prepared` and `dense` as of `Predictor`."""
    return Predictor(device, prepared, dense=dense)(recipe, config, choice)


class Predictor:
    """Predictions for a recipe and variations of it; what they have in common is done once.

    Args:
        device: where the run is, cpu or cuda.
        prepared: by layer, what the adapter found out from data; None: nothing yet, and it is
            counted at its bound.
        traces: whether models may be traced, which takes seconds each; if not, a recipe that
            arithmetic does not know is refused.
        dense: gives a model's configuration before it is compressed; None: it is so already.
    """

    def __init__(
        self,
        device: str = "cpu",
        prepared: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        traces: bool = True,
        dense: Callable[[Any], Any] | None = None,
    ) -> None:
        self._device, self._prepared, self._traces = device, prepared or {}, traces
        self._dense = dense
        self._befores: dict[str, list[tuple[Any, Ledger]]] = {}
        self._samples: dict[str, list[tuple[Any, Ledger]]] = {}
        self._structures: dict[str, list[tuple[Any, Structure]]] = {}

    def without_traces(self) -> Predictor:
        """The same predictor, for recipes that arithmetic knows; it refuses the others."""
        other = Predictor(self._device, self._prepared, traces=False, dense=self._dense)
        other._structures, other._befores = self._structures, self._befores
        other._samples = self._samples
        return other

    def __call__(self, recipe: Recipe, config: Any, choice: Choice) -> Prediction:
        """What a rank's step takes; where layers take another form later, at the most."""
        each = [self._of(recipe, one, choice) for one in (config, *_later(recipe, config))]
        found = max(each, key=lambda prediction: prediction.peak_bytes)
        compressor = recipe.method("compress")
        if self._dense is None or not isinstance(compressor, Compressor):
            return found
        return replace(found, before=self._before(recipe, compressor, self._dense(config), choice))

    def _before(self, recipe: Recipe, compressor: Compressor, dense: Any, choice: Choice) -> Ledger:
        """What is held while the model is made smaller; found once for recipes that are alike."""
        return _once(
            self._befores.setdefault(known_by(recipe, choice), []),
            dense,
            lambda: compression_ledger(recipe, compressor, dense, choice, self._of),
        )

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
        ledger += self._sampled(recipe, config, shape)
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

    def _sampled(self, recipe: Recipe, config: Any, shape: ModelQuery) -> Ledger:
        """What samples hold; found once for recipes that are alike."""
        key = f"{recipe.task} {recipe.samples} {shape.weight_bytes}"
        sampled = task_of(recipe).sampled
        found = self._samples.setdefault(key, [])
        return _once(found, config, lambda: sampled(recipe, config, shape))

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
        found = self._structures.setdefault(key, [])
        return _once(found, config, lambda: _structure(recipe, config, self._prepared))


def _once(known: list[tuple[Any, T]], config: Any, make: Callable[[], T]) -> T:
    """What is made of a configuration, or was made before of one that is equal."""
    for other, made in known:
        if other is config or other == config:
            return made
    known.append((config, make()))
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
    left |= left_out_by_adapter(attached)
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
