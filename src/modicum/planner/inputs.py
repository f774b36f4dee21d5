"""What a plan finds on the disk: the model's header, the tokenizer, the data's first rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from modicum.core.errors import InputError
from modicum.data.sources import Inspection, Source, inspect, open_source
from modicum.data.tokenizer import Tokenizer
from modicum.models import huggingface
from modicum.models.config import ModelConfig
from modicum.recipe import Recipe


@dataclass(frozen=True)
class Inputs:
    """A recipe's model and data, looked at but not read whole.

    `tokenizer` is None where one is to be trained on the data; `model_folder` where the model is
    new.
    """

    config: ModelConfig
    model_folder: Path | None
    tokenizer: Tokenizer | None
    source: Source
    validation_source: Source | None
    inspection: Inspection


def look(recipe: Recipe) -> Inputs:
    """Check paths, headers and the data's first 1,000 rows.

    Raises:
        InputError: with the recipe's field, or the file and line at fault.
    """
    folder, tokenizer = None, None
    if recipe.model.path is not None:
        try:
            header = huggingface.read_header(recipe.model.path)
        except InputError as error:
            raise error.located(field="model.path") from None
        folder, config = header.folder, header.config
    else:
        config = new_config(recipe)
    if recipe.data.sequence_length > config.context:
        raise InputError(
            f"longer than the model's context ({config.context})",
            field="data.sequence_length",
            value=recipe.data.sequence_length,
            allowed=f"at most {config.context}",
        )
    tokenizer_path = recipe.data.tokenizer or folder
    if tokenizer_path is not None:
        try:
            tokenizer = Tokenizer.load(tokenizer_path)
        except InputError as error:
            field = "data.tokenizer" if recipe.data.tokenizer else "model.path"
            raise error.located(field=field) from None
        if folder is None:
            config = replace(config, vocabulary_size=tokenizer.vocabulary_size)
    source, validation = sources(recipe)
    inspection = _inspected(source, "data.path")
    if validation is not None:
        _inspected(validation, "data.validation_path")
    return Inputs(config, folder, tokenizer, source, validation, inspection)


def _inspected(source: Source, field: str) -> Inspection:
    try:
        return inspect(source)
    except InputError as error:
        raise error.located(field=field) from None


def sources(recipe: Recipe) -> tuple[Source, Source | None]:
    """The data that a recipe trains on, and what it evaluates on if that is other data."""
    data = recipe.data

    def opened(path: str | None, field: str) -> Source:
        return open_source(
            path,
            include=data.include,
            exclude=data.exclude,
            column=data.column,
            prompt_column=data.prompt_column,
            limit_bytes=data.limit,
            field=field,
        )

    validation = None
    if data.validation_path is not None:
        validation = opened(data.validation_path, "data.validation_path")
    return opened(data.path, "data.path"), validation


def new_config(recipe: Recipe) -> ModelConfig:
    """The configuration of a new model by the recipe's `model` section."""
    model = recipe.model
    return ModelConfig(
        vocabulary_size=model.vocabulary_size,
        width=model.width,
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.kv_heads or 0,
        mlp_width=model.mlp_width or 0,
        context=model.context or recipe.data.sequence_length,
        tied_embeddings=model.tied_embeddings,
        mixer=model.mixer,
        mlp=model.mlp,
        linear=model.linear,
    )
