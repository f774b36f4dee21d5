"""What a run on text reads: the model's header, the tokenizer, the data; and how it is prepared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modicum.compress.base import Compressor
from modicum.core.errors import InputError
from modicum.core.files import file_digest
from modicum.core.layers.form_plan import FormPlan
from modicum.core.layers.meta import on_meta
from modicum.core.progress import StageProgress
from modicum.core.ranks.ranks import Ranks
from modicum.data.batch import Batch
from modicum.data.fitting import PackingCounts
from modicum.data.packed_examples import PackedExamples
from modicum.data.packing import Packed
from modicum.data.sampler import Sampler
from modicum.data.sources import Inspection, Source, inspect
from modicum.data.store import Prepared, TokenStore, prepare
from modicum.data.survey import survey
from modicum.data.text_rows import TextRows
from modicum.data.tokenizer import Tokenizer
from modicum.linears.base import LinearMethod
from modicum.models import huggingface
from modicum.models.config import ModelConfig
from modicum.models.llama import Llama
from modicum.recipe import Recipe
from modicum.tasks.base import Data, Inputs
from modicum.tasks.text_sources import sources


@dataclass(frozen=True)
class TextInputs(Inputs):
    """A recipe's model and text, looked at but not read in full.

    `tokenizer` is None where one is to be trained on the data; `forms` are those in which the
    folder holds the layers, before the recipe's.
    """

    config: ModelConfig
    tokenizer: Tokenizer | None
    source: Source
    validation_source: Source | None
    inspection: Inspection
    forms: FormPlan


@dataclass(frozen=True, kw_only=True)
class TextData(Data[Batch]):
    """Tokenized data, packed into rows, and the tokenizer that made it."""

    train: TextRows
    validation: TextRows | None
    tokenizer: Tokenizer


def look(recipe: Recipe) -> TextInputs:
    """Check paths, headers and the data's first 1,000 rows.

    Raises:
        InputError: with the recipe's field, or the file and line at fault.
    """
    folder, tokenizer, dtypes = None, None, frozenset[str]()
    if recipe.model.path is not None:
        try:
            header = huggingface.read_header(recipe.model.path)
        except InputError as error:
            raise error.located(field="model.path") from None
        folder, config, dtypes = header.folder, header.config, header.dtypes
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
    forms, config = config.forms, formed(recipe, config)
    source, validation = sources(recipe, tokenizer)
    inspection = _inspected(source, "data.path")
    if validation is not None:
        _inspected(validation, "data.validation_path")
    told = source.describe()
    return TextInputs(
        config, folder, told, tokenizer, source, validation, inspection, forms, dtypes=dtypes
    )


def _inspected(source: Source, field: str) -> Inspection:
    try:
        return inspect(source)
    except InputError as error:
        raise error.located(field=field) from None


def formed(
    recipe: Recipe, config: ModelConfig, slots: Iterable[str] = ("linear", "compress")
) -> ModelConfig:
    """The shape of the model with the forms that the recipe gives its layers, by arithmetic.

    Layers that the model's files hold in a form of their own keep it.

    Args:
        slots: the sections of the recipe that give layers a form.

    Raises:
        InputError: nothing would become smaller, or a target names no layer.
    """
    for slot in slots:
        method = recipe.method(slot)
        if method is None:
            continue
        assert isinstance(method, (LinearMethod, Compressor))
        with on_meta():
            model = Llama(config)
        try:
            config = replace(config, forms=method.plan(model, config.forms))
        except InputError as error:
            raise error.within(slot) from None
    return config


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
    )


def prepared(
    recipe: Recipe, inputs: TextInputs, folder: Path, progress: StageProgress, ranks: Ranks
) -> TextData:
    """Read and check all text, tokenize it once, and pack it.

    Rank 0 writes the tokenizer and the tokens into the run folder; the others find them written.

    Raises:
        InputError: what is wrong with the data, with file and line.
    """

    def check() -> None:
        progress("reading data", 0, None)

    tokenizer = ranks.first_alone(lambda: _tokenizer(inputs, folder / "tokenizer", progress), check)
    held = ranks.first_alone(
        lambda: _tokenized(recipe, inputs, tokenizer, folder / "data", progress), check
    )
    train = packed(recipe, held.train)
    validation = None if held.validation is None else packed(recipe, held.validation)
    return TextData(
        train=train,
        validation=validation,
        sampler=Sampler(len(train), recipe.training.batch_size, recipe.training.seed),
        tokenizer=tokenizer,
        identity={"made_from": file_digest(held.train.folder / "manifest.json")},
        files=tuple(sorted((folder / "tokenizer").glob("*"))),
        counts=_counts(inputs, train.counts),
    )


def packed(recipe: Recipe, store: TokenStore) -> TextRows:
    """The rows of a store: examples in one piece each, continuous text end to end.

    Raises:
        InputError: nothing in it is trained.
    """
    data = recipe.data
    if not store.examples:
        return Packed(store, data.sequence_length, data.boundaries)
    return PackedExamples(
        store,
        data.sequence_length,
        data.boundaries,
        too_long=data.too_long,
        seed=recipe.training.seed,
    )


def surveyed(recipe: Recipe, inputs: TextInputs) -> dict[str, Any]:
    """What packing will make of the data, and whether that is `exact`.

    Raises:
        InputError: what is wrong with the data, with file and line.
    """
    data = recipe.data
    drawn = 0.0 if data.validation_path is not None else data.validation_fraction
    try:
        found = survey(
            inputs.source,
            inputs.tokenizer,
            vocabulary_size=inputs.config.vocabulary_size,
            held_out_fraction=drawn,
            seed=recipe.training.seed,
            sequence_length=data.sequence_length,
            boundaries=data.boundaries,
            too_long=data.too_long,
        )
    except InputError as error:
        raise error.located(field="data.path") from None
    return {**_counts(inputs, found.counts), "exact": found.exact}


def _counts(inputs: TextInputs, counts: PackingCounts) -> dict[str, Any]:
    """What a plan and run.json have of the data."""
    return {**counts.as_json(), "conversations": inputs.source.rows.conversations}


def _tokenizer(inputs: TextInputs, kept: Path, progress: StageProgress) -> Tokenizer:
    """The run's tokenizer: the one kept in the run folder, the model's, or one trained now."""
    if (kept / "tokenizer.json").exists():
        return Tokenizer.load(kept)
    tokenizer = inputs.tokenizer
    if tokenizer is None:
        total = inputs.source.total_bytes

        def tell(done: int, _: int | None) -> None:
            progress("training tokenizer", min(done, total), total)

        texts = (document.text for document in inputs.source.documents())
        try:
            tokenizer = Tokenizer.train(texts, inputs.config.vocabulary_size, tell)
        except InputError as error:
            raise error.located(field="data.path") from None
    if inputs.source.rows.conversations and (template := inputs.source.rows.template) is not None:
        # What is trained by the recipe's template is asked by it afterwards, here and elsewhere.
        tokenizer = tokenizer.with_template(template.source)
    tokenizer.save(kept)
    return tokenizer


def _tokenized(
    recipe: Recipe, inputs: TextInputs, tokenizer: Tokenizer, folder: Path, progress: StageProgress
) -> Prepared:
    try:
        return prepare(
            inputs.source,
            tokenizer,
            folder,
            model_vocabulary=inputs.config.vocabulary_size,
            validation_source=inputs.validation_source,
            validation_fraction=recipe.data.validation_fraction,
            seed=recipe.training.seed,
            longest=_longest(recipe),
            progress=lambda done, total: progress("tokenizing", done, total),
        )
    except InputError as error:
        raise error.located(field="data.path") from None


def _longest(recipe: Recipe) -> int | None:
    """The tokens of the longest example that is not refused; the last one is no input."""
    if recipe.data.too_long != "refuse":
        return None
    return recipe.data.sequence_length + int(recipe.data.boundaries)
