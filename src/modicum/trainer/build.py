"""From a plan to the things that a step needs: model, adapter, optimizer, data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from modicum.adapters import AttachedAdapter
from modicum.adapters.base import Adapter
from modicum.core.errors import InputError
from modicum.core.files import file_digest
from modicum.core.method import Context
from modicum.core.parameters import optimizer_groups
from modicum.data.packing import Packed
from modicum.data.sampler import Sampler
from modicum.data.store import Prepared, prepare
from modicum.data.tokenizer import Tokenizer
from modicum.models import huggingface
from modicum.models.config import ModelConfig
from modicum.models.llama import Llama, create
from modicum.planner import Plan

Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class Data:
    """Tokenized data, packed into rows, and the order in which they are taken."""

    tokenizer: Tokenizer
    prepared: Prepared
    train: Packed
    validation: Packed | None
    sampler: Sampler


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


def same_data(
    data: Data,
) -> tuple[Callable[[], dict[str, str]], Callable[[Mapping[str, str]], None]]:
    """Reader and checker of what the tokens were made from, a part of the run's state.

    A run that goes on with other data than it began with is another run, so that is refused.
    """
    identity = {"made_from": file_digest(data.prepared.train.folder / "manifest.json")}

    def check(state: Mapping[str, str]) -> None:
        if state != identity:
            raise InputError(
                "the data has changed since this run began; put it back as it was, or start a new "
                "run from this one's state: give --out a new folder and --fork this one",
                field="data.path",
            )

    return lambda: identity, check


def build_model(plan: Plan, tokenizer: Tokenizer) -> tuple[Llama, AttachedAdapter | None]:
    """The model on its device, in the dtype the recipe asks for, wearing its adapter if any."""
    recipe, device = plan.recipe, torch.device(plan.device)
    method = recipe.method("adapter")
    half = recipe.training.precision == "bf16" and method is not None
    dtype = torch.bfloat16 if half else torch.float32
    config = model_config(plan, tokenizer)
    if plan.inputs.model_folder is None:
        model = create(config, recipe.training.seed, device, dtype)
    else:
        model = huggingface.load(plan.inputs.model_folder, dtype, device, recipe.model.linear)
    model.recompute = plan.prediction.choice.recompute
    if method is None:
        return model, None
    assert isinstance(method, Adapter)
    return model, method.bind(Context(model, recipe.training.seed))


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
