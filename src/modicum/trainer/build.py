"""From a plan to the things that a step needs: model, adapter, optimizer, data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from modicum.adapters import AttachedAdapter
from modicum.adapters.base import Adapter
from modicum.core.errors import InputError
from modicum.core.files import file_digest
from modicum.core.meta import materialise, on_meta
from modicum.core.method import Context
from modicum.core.parameters import optimizer_groups
from modicum.core.ranks import Ranks
from modicum.core.strategy import Strategy
from modicum.data.packing import Packed
from modicum.data.sampler import Sampler
from modicum.data.store import Prepared, prepare
from modicum.data.tokenizer import Tokenizer
from modicum.models import huggingface
from modicum.models.config import ModelConfig
from modicum.models.llama import Llama
from modicum.parallel.replicated import Replicated
from modicum.parallel.sharded import Sharded
from modicum.planner import Plan
from modicum.trainer.alike import model_files
from modicum.trainer.compiled import compile_blocks

Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class Data:
    """Tokenized data, packed into rows, and the order in which they are taken."""

    tokenizer: Tokenizer
    prepared: Prepared
    train: Packed
    validation: Packed | None
    sampler: Sampler


def build_strategy(plan: Plan, ranks: Ranks) -> Strategy:
    """How the ranks share the work, by the plan's layout."""
    layout, parallel = plan.prediction.choice.layout, plan.recipe.parallel
    if ranks.alone:
        return Strategy(ranks, layout)
    if layout.shards == 1:
        return Replicated(ranks, layout, parallel.bucket)
    return Sharded(ranks, layout, parallel.reshard_after_forward)


def build_tokenizer(plan: Plan, folder: Path, progress: Progress) -> Tokenizer:
    """The run's tokenizer: the one kept in the run folder, the model's, or one trained now.

    Raises:
        InputError: what is wrong with the data, with file and line.
    """
    kept = folder / "tokenizer"
    if (kept / "tokenizer.json").exists():
        return Tokenizer.load(kept)
    tokenizer = plan.inputs.tokenizer
    if tokenizer is None:
        total = plan.inputs.source.total_bytes

        def tell(done: int, _: int | None) -> None:
            progress("training tokenizer", min(done, total), total)

        texts = (document.text for document in plan.inputs.source.documents())
        try:
            tokenizer = Tokenizer.train(texts, plan.inputs.config.vocabulary_size, tell)
        except InputError as error:
            raise error.located(field="data.path") from None
    tokenizer.save(kept)
    return tokenizer


def build_data(plan: Plan, tokenizer: Tokenizer, folder: Path, progress: Progress) -> Data:
    """Read and check all data, tokenize it once, and pack it.

    Raises:
        InputError: what is wrong with the data, with file and line.
    """
    recipe = plan.recipe
    try:
        prepared = prepare(
            plan.inputs.source,
            tokenizer,
            folder / "data",
            model_vocabulary=plan.inputs.config.vocabulary_size,
            validation_source=plan.inputs.validation_source,
            validation_fraction=recipe.data.validation_fraction,
            seed=recipe.training.seed,
            progress=lambda done, total: progress("tokenizing", done, total),
        )
    except InputError as error:
        raise error.located(field="data.path") from None
    length, boundaries = recipe.data.sequence_length, recipe.data.boundaries
    train = Packed(prepared.train, length, boundaries)
    held = prepared.validation
    validation = Packed(held, length, boundaries) if held is not None else None
    sampler = Sampler(len(train), recipe.training.batch_size, recipe.training.seed)
    return Data(tokenizer, prepared, train, validation, sampler)


def same_inputs(
    data: Data, model_folder: Path | None
) -> tuple[Callable[[], dict[str, Any]], Callable[[Mapping[str, Any]], None]]:
    """Reader and checker of what a run was begun with, a part of its state.

    A run that goes on with other data or another base model is another run, so that is refused.
    """
    identity = {
        "made_from": file_digest(data.prepared.train.folder / "manifest.json"),
        "model": model_files(model_folder),
    }
    what = {"made_from": ("data", "data.path"), "model": ("base model", "model.path")}

    def check(state: Mapping[str, Any]) -> None:
        for key, (name, field) in what.items():
            if state.get(key) != identity[key]:
                raise InputError(
                    f"the {name} has changed since this run began; put it back as it was, or start "
                    "a new run from this one's state: give --out a new folder and --fork this one",
                    field=field,
                )

    return lambda: identity, check


def wrapped(
    plan: Plan, config: ModelConfig, *, adapted: bool = True
) -> tuple[Llama, AttachedAdapter | None]:
    """A model of this shape without memory, in the recipe's dtype, wearing its adapter if any."""
    recipe = plan.recipe
    method = recipe.method("adapter") if adapted else None
    half = recipe.training.precision == "bf16" and method is not None
    with on_meta(torch.bfloat16 if half else torch.float32):
        model = Llama(replace(config, linear=recipe.model.linear))
        adapter = None
        if method is not None:
            assert isinstance(method, Adapter)
            adapter = method.bind(Context(model, recipe.training.seed))
    model.recompute = plan.prediction.choice.recompute
    return model, adapter


def build_model(
    plan: Plan, tokenizer: Tokenizer, strategy: Strategy, *, compiled: bool = False
) -> tuple[Llama, AttachedAdapter | None]:
    """The model on its device.

    Everything that changes its structure is done before it has memory: so no rank ever holds more
    than its part of it.
    """
    recipe, device = plan.recipe, torch.device(plan.device)
    model, adapter = wrapped(plan, model_config(plan, tokenizer))
    if compiled:
        compile_blocks(model)
    strategy.cut(model, model.model.layers, device, methods=("continued",))
    materialise(model, device)
    if plan.inputs.model_folder is None:
        model.initialise(recipe.training.seed)
    else:
        huggingface.fill(model, plan.inputs.model_folder)
    if adapter is not None:
        adapter.initialise()
    strategy.start(model)
    return model, adapter


def model_config(plan: Plan, tokenizer: Tokenizer) -> ModelConfig:
    """The model's configuration, its special tokens those of the tokenizer where it is new."""
    config = plan.inputs.config
    if plan.inputs.model_folder is not None:
        return config
    eos = tokenizer.eos_id
    return replace(config, bos_token_id=eos, eos_token_id=eos, pad_token_id=eos)


def build_optimizer(plan: Plan, model: Llama) -> torch.optim.Optimizer:
    """AdamW over the trained parameters, in PyTorch's fused form, which needs no scratch memory."""
    recipe = plan.recipe
    groups = optimizer_groups(
        model,
        learning_rate=recipe.training.learning_rate,
        weight_decay=recipe.optimizer.weight_decay,
    )
    return torch.optim.AdamW(
        groups, betas=recipe.optimizer.betas, eps=recipe.optimizer.epsilon, fused=True
    )
