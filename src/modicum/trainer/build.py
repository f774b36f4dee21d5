"""From a plan to the things that a step needs: model, adapter, optimizer, how ranks share them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modicum.adapters import AttachedAdapter
from modicum.adapters.base import Adapter
from modicum.adapters.diagnosis import DiagnosisContext, ModelDiagnosis
from modicum.adapters.files import read_stored
from modicum.adapters.head_blocks import note_fused_heads
from modicum.adapters.preparation import Preparation
from modicum.adapters.starting import start_from
from modicum.comm.base import MatrixMethod, Schedule
from modicum.compress.base import Compressor
from modicum.core.contracts.optimizers import OptimizerMethod
from modicum.core.contracts.parameters import optimizer_groups
from modicum.core.contracts.step import StepContext, StepProgram
from modicum.core.contracts.strategy import Strategy
from modicum.core.errors import InputError
from modicum.core.layers.basis_cache import bases_kept_in, own_folder
from modicum.core.layers.full_model import FullModel, note_full_model
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.ranks.exchange import ExchangeContext
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.matrix_exchange import MatrixExchange
from modicum.core.ranks.ranks import Ranks
from modicum.core.weight_digests import changed_weights, weight_digests
from modicum.linears.base import FormContext
from modicum.memory.base import ActivationContext, ActivationPolicy
from modicum.optim.transform import GradientTransform, TransformContext
from modicum.parallel.alone import AloneWithMatrices, AloneWithRows
from modicum.parallel.replicated import Replicated
from modicum.parallel.sharded import Sharded
from modicum.parallel.zero import Zero
from modicum.planner import Plan
from modicum.planner.explained import planned_positions
from modicum.tasks import Data
from modicum.trainer.compiled_blocks import compile_blocks


def build_strategy(plan: Plan, ranks: Ranks) -> Strategy:
    """How the ranks share the work, by the plan's layout and the recipe's way to exchange."""
    layout, parallel = plan.prediction.choice.layout, plan.recipe.parallel
    method = plan.recipe.method("comm")
    context = ExchangeContext(ranks, plan.recipe.training.seed, torch.device(plan.device).type)
    if ranks.alone:
        return _alone(method, context, layout)
    if isinstance(method, Schedule):
        return method.strategy(ranks, layout)
    exchange: Any = None
    matrices: MatrixExchange | None = None
    if isinstance(method, MatrixMethod):
        if layout.shards > 1 and layout.replicas > 1:
            context = replace(context, hybrid=layout)
        elif layout.shards > 1:
            exchange = method.bind_rows(context)
        matrices = method.bind(context) if exchange is None else None
    elif method is not None:
        exchange = method.bind(context)
    if layout.copies:
        return Zero(ranks, layout, exchange, parallel.bucket, matrices)
    if layout.shards == 1:
        return Replicated(ranks, layout, parallel.bucket, matrices)
    return Sharded(ranks, layout, parallel.reshard_after_forward, exchange, matrices)


def _alone(method: Any, context: ExchangeContext, layout: Layout) -> Strategy:
    """The strategy of one rank, which keeps the state that an exchange has among several."""
    exchange = None if method is None or isinstance(method, Schedule) else method.bind(context)
    if exchange is None or not exchange.stateful:
        return Strategy(context.ranks, layout)
    if isinstance(exchange, MatrixExchange):
        return AloneWithMatrices(context.ranks, layout, exchange)
    return AloneWithRows(context.ranks, layout, exchange)


def same_inputs(
    data: Data[Any], model_folder: Path | None
) -> tuple[Callable[[], dict[str, Any]], Callable[[Mapping[str, Any]], None]]:
    """Reader and checker of what a run was begun with, a part of its state.

    A run that resumes with other data or another base model is another run, so that is refused.
    """
    identity = {**data.identity, "model": weight_digests(model_folder)}

    def refuse(name: str, field: str) -> None:
        raise InputError(
            f"the {name} has changed since this run began; put it back as it was, or start "
            "a new run from this one's state: give --out a new folder and --fork this one",
            field=field,
        )

    def check(state: Mapping[str, Any]) -> None:
        if changed := changed_weights(model_folder, state.get("model", {})):
            refuse(f"base model ({', '.join(changed)})", "model.path")
        if any(state.get(key) != value for key, value in data.identity.items()):
            refuse("data", "data.path")
        data.sampler.resume(state)

    return lambda: {**identity, **data.sampler.state()}, check


def wrapped(
    plan: Plan,
    config: Any,
    *,
    adapted: bool = True,
    prepared: Preparation | None = None,
    part_of: FullModel | None = None,
) -> tuple[Any, AttachedAdapter | None]:
    """A model of this shape without memory, in the recipe's dtype, its adapter attached if any.

    Args:
        prepared: what the adapter found out from data; None where that is not known yet.
        part_of: the full model, where this one lost units of it.
    """
    recipe = plan.recipe
    method = recipe.method("adapter") if adapted else None
    half = recipe.training.precision == "bf16" and method is not None
    with on_meta(torch.bfloat16 if half else torch.float32):
        model = plan.task.model(config)
        note_full_model(model, part_of)
        adapter = None
        if method is not None:
            assert isinstance(method, Adapter)
            adapter = method.attach(model, seed=recipe.training.seed, prepared=prepared)
            if (positions := planned_positions(plan.choices)) is not None:
                adapter.plan_for(positions)
        elif isinstance(compressor := recipe.method("compress"), Compressor):
            compressor.freeze(model)
    model.recompute = plan.prediction.choice.recompute
    return model, adapter


def build_model(
    plan: Plan,
    config: Any,
    strategy: Strategy,
    *,
    compiled: bool = False,
    kept: Mapping[str, torch.Tensor] | None = None,
    prepared: Preparation | None = None,
    skip: Collection[str] = (),
    start: Path | None = None,
) -> tuple[Any, AttachedAdapter | None]:
    """The model on its device.

    Everything that changes its structure is done before it has memory: so no rank ever holds more
    than its part of it.

    Args:
        kept: the model's state in a checkpoint that the run resumes from.
        prepared: what its adapter found out from data, if it asks for any.
        skip: parameters whose values come from a state, and not from the base model's files.
        start: a folder with the adapter that training starts from, where there is no state yet.
    """
    recipe, device = plan.recipe, torch.device(plan.device)
    full = FullModel.read(plan.inputs.model_folder)
    model, adapter = wrapped(plan, config, prepared=prepared, part_of=full)
    if compiled:
        compile_blocks(model)
    strategy.cut(model, model.blocks, device, methods=plan.task.called)
    materialise(model, device)
    if plan.inputs.model_folder is None:
        model.initialise(recipe.training.seed)
    else:
        plan.task.fill(model, plan.inputs, skip)
    if adapter is not None:
        weights, folder = plan.task.weights(plan.inputs), plan.inputs.model_folder
        with bases_kept_in(None if folder is None else own_folder(folder)):
            if start is not None and kept is None:
                stored = read_stored(start, model, plugins=recipe.plugins)
                start_from(adapter, stored, weights=weights, ranks=strategy.ranks)
            else:
                adapter.initialise(weights=weights, kept=kept, ranks=strategy.ranks)
    strategy.start(model)
    return model, adapter


def add_hooks(
    plan: Plan,
    model: nn.Module,
    adapter: AttachedAdapter | None,
    strategy: Strategy,
    program: StepProgram,
) -> None:
    """Have the recipe's methods take part in the run, in the order of their slots.

    Raises:
        InputError: a method may change shapes, or asks for two passes, and no trait says so.
    """
    recipe, seed, ranks = plan.recipe, plan.recipe.training.seed, strategy.ranks
    trained = dict(strategy.trained(model))
    bound: dict[str, Any] = {}
    if recipe.method("linear") is not None:
        bound["linear"] = FormContext(model, seed, trained, ranks)
    # A compressor has done its work; what it left is in the model.
    if recipe.method("compress") is not None:
        bound["compress"] = model
    # A program that has no optimizer of PyTorch's may be a hook itself.
    updates = program if program.optimizer is None else program.optimizer
    bound |= {"adapter": adapter, "comm": strategy, "optimizer": updates}
    if (transform := recipe.method("transform")) is not None:
        assert isinstance(transform, GradientTransform)
        context = TransformContext(model, seed, trained, ranks, program.optimizer, "sum")
        bound["transform"] = transform.bind(context)
    if (policy := recipe.method("memory")) is not None:
        assert isinstance(policy, ActivationPolicy)
        bound["memory"] = policy.bind(ActivationContext(model, seed, ranks))
    if (diagnosis := recipe.method("diagnosis")) is not None:
        assert isinstance(diagnosis, ModelDiagnosis)
        bound["diagnosis"] = diagnosis.bind(DiagnosisContext(model, seed, ranks))
    for slot, one in bound.items():
        method = recipe.method(slot)
        hook = one if method is None else method.run_hook(one)
        program.hooks.add(slot, None if hook is model else hook)
    says = {trait for part in recipe.parts() for trait in part.traits}
    asked = {
        ("surgery", "changes_shapes"): program.hooks.may_change_shapes,
        ("pair_loss", "pairs_passes"): program.hooks.pair_passes,
    }
    for (member, trait), is_there in asked.items():
        if is_there and trait not in says:
            problem = f"a method here has a hook `{member}`, and none has the trait {trait}"
            named = (recipe.optimizer or {})["method"]
            raise InputError(problem, field="optimizer.method", value=named)


def build_program(plan: Plan, model: nn.Module, strategy: Strategy) -> StepProgram:
    """What makes the run's updates, as the method of the section `optimizer` has it.

    Raises:
        InputError: the recipe asks for what means nothing to it.
    """
    training = plan.recipe.training

    def groups(weight_decay: float) -> list[dict[str, Any]]:
        return optimizer_groups(
            model,
            learning_rate=training.learning_rate,
            weight_decay=weight_decay,
            trained=dict(strategy.trained(model)),
        )

    method = plan.recipe.method("optimizer")
    assert method is not None
    if isinstance(method, OptimizerMethod) and method.reads_heads:
        note_fused_heads(model)
    return method.bind_step(
        StepContext(
            model,
            training.seed,
            task=plan.task,
            strategy=strategy,
            groups=groups,
            precision=training.precision,
            clip_norm=training.clip_norm,
        )
    )
