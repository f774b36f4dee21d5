"""What a run on text reads: the model's header, the tokenizer, the data; and how it is prepared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modicum.compress.base import Compressor
from modicum.core.errors import InputError
from modicum.core.layers.form_plan import FormPlan
from modicum.core.layers.meta import on_meta
from modicum.core.machine.record import Reads
from modicum.core.progress import StageProgress
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.ranks import Ranks
from modicum.data.batch import Batch
from modicum.data.parts import PARTS, TEST, TRAIN, VALIDATION
from modicum.data.source_mix import SourceMix
from modicum.data.sources import Source, inspect
from modicum.data.text_rows import TextRows
from modicum.data.tokenizer import Tokenizer
from modicum.data.tokenizer_files import exported_files, moment_of
from modicum.linears.base import LinearMethod
from modicum.models.config import ModelConfig
from modicum.models.decoder_config import DecoderConfig
from modicum.models.decoders import decoder_of
from modicum.models.plan_headers import header_for_plan
from modicum.recipe import Recipe
from modicum.tasks.base import Data, Inputs
from modicum.tasks.model_origins import model_folder
from modicum.tasks.parts import draw_of, field_of_part
from modicum.tasks.text_parts import (
    AnySource,
    counts_of,
    field_of,
    identity_of,
    parts_of,
    rows_of,
    sampler_of,
    tokenized,
)
from modicum.tasks.text_parts import surveyed as survey_of
from modicum.tasks.text_sources import sources

_ALONE = "this model computes the documents of a row one at a time"


@dataclass(frozen=True)
class TextInputs(Inputs):
    """A recipe's model and text, looked at but not read in full.

    `tokenizer` is None where one is to be trained on the data; `others` are the data of parts that
    have data of their own; `forms` are those in which the folder holds the layers, before the
    recipe's.
    """

    config: DecoderConfig
    tokenizer: Tokenizer | None
    source: AnySource
    others: Mapping[str, Source]
    forms: FormPlan

    @property
    def reads(self) -> Reads:
        """Text, with the folder's tokenizer or one that is trained on it."""
        return "new tokenizer" if self.tokenizer is None else "tokenizer"


@dataclass(frozen=True, kw_only=True)
class TextData(Data[Batch]):
    """Tokenized data, packed into rows, and the tokenizer that made it."""

    train: TextRows
    validation: TextRows | None
    tokenizer: Tokenizer


def data_files(recipe: Recipe, inputs: TextInputs) -> list[Path]:
    """The files that the text is read from; none of a stream, which nobody reads in full."""
    if recipe.data.streaming:
        return []
    every = (*parts_of(inputs.source), *inputs.others.values())
    return [file.path for source in every for file in source.files]


def look(recipe: Recipe) -> TextInputs:
    """Check paths, headers and the data's first 1,000 rows.

    Raises:
        InputError: with the recipe's field, or the file and line at fault.
    """
    folder, tokenizer, weights, dtypes = None, None, True, frozenset[str]()
    config: DecoderConfig
    if recipe.model.path is not None:
        try:
            header = header_for_plan(model_folder(recipe))
        except InputError as error:
            raise error.located(field="model.path") from None
        folder, config, weights = header.folder, header.config, bool(header.tensors)
        dtypes = header.dtypes
        check_trained(config, recipe)
    else:
        config = new_config(recipe)
    if recipe.data.sequence_length > config.context:
        raise InputError(
            f"longer than the model's context ({config.context})",
            field="data.sequence_length",
            value=recipe.data.sequence_length,
            allowed=f"at most {config.context}",
        )
    # A folder of config.json alone is planned with a tokenizer that is guessed from the data.
    own = folder if weights or (folder and (folder / "tokenizer.json").is_file()) else None
    tokenizer_path = recipe.data.tokenizer or own
    if tokenizer_path is not None:
        try:
            tokenizer = Tokenizer.load(tokenizer_path)
        except InputError as error:
            field = "data.tokenizer" if recipe.data.tokenizer else "model.path"
            raise error.located(field=field) from None
        if isinstance(config, ModelConfig) and folder is None:
            config = replace(config, vocabulary_size=tokenizer.vocabulary_size)
    if recipe.data.streaming and tokenizer is None:
        raise InputError(
            "a tokenizer is trained on all data, and a stream is not read ahead; name a folder "
            "with tokenizer.json, such as that of an earlier run",
            field="data.tokenizer",
            value=None,
        )
    forms, config = config.forms, formed(recipe, config)
    source, others = sources(recipe, tokenizer)
    for number, part in enumerate(parts_of(source)):
        _inspect(part, field_of(source, number))
    for name, other in others.items():
        _inspect(other, field_of_part(recipe.data, name))
    apart = packs(config, recipe.data.sequence_length) or not recipe.data.boundaries
    told = source.describe() + ("; streamed" if recipe.data.streaming else "")
    told += "".join(f"; {name}: {other.describe()}" for name, other in others.items())
    told += "" if apart else f"; {_alone(recipe, config)}"
    return TextInputs(
        config, folder, told, tokenizer, source, others, forms, weights=weights, dtypes=dtypes
    )


def packs(config: DecoderConfig, tokens: int) -> bool:
    """Whether documents that share a row of so many tokens are computed at once, each as alone.

    If not, a model computes them one at a time, where a recipe keeps them apart.
    """
    return isinstance(config, ModelConfig) or config.packs(tokens)


def _alone(recipe: Recipe, config: DecoderConfig) -> str:
    """That documents are computed one at a time, and why where shorter rows would not need it."""
    assert not isinstance(config, ModelConfig)
    if config.packing == "none":
        return _ALONE
    return (
        f"{_ALONE} (its positions depend on the longest document in rows of more than "
        f"{config.rope_limits.shortest:,} tokens, and data.sequence_length is "
        f"{recipe.data.sequence_length:,})"
    )


def pads_apart(config: DecoderConfig, tokens: int) -> bool:
    """Whether a document that padding follows in a row of so many tokens would be another one."""
    return not isinstance(config, ModelConfig) and not config.rope_limits.alike(tokens)


def check_trained(config: DecoderConfig, recipe: Recipe) -> None:
    """Refuse what is not shown of a decoder of transformers.

    Raises:
        InputError: logits depend on later tokens, or blocks are to be compiled that meet rows of
            any length.
    """
    if isinstance(config, ModelConfig):
        return
    try:
        config.check()
    except InputError as error:
        raise error.located(field="model.path") from None
    if recipe.training.compile == "blocks" and (why := why_eager(recipe, config)) is not None:
        raise InputError(
            f"{why}; set this to none, or data.boundaries to false",
            field="training.compile",
            value="blocks",
            allowed="none",
        )


def why_eager(recipe: Recipe, config: DecoderConfig) -> str | None:
    """Why blocks of this model are not compiled; None: they may be."""
    if packs(config, recipe.data.sequence_length) or not recipe.data.boundaries:
        return None
    return f"{_alone(recipe, config)}, each length of which would be compiled anew"


def check_layout(recipe: Recipe, config: DecoderConfig, layout: Layout) -> None:
    """Refuse sharded weights for a model that computes documents of a row one at a time.

    Raises:
        InputError: ranks would wait for each other with different numbers of documents.
    """
    tokens, apart = recipe.data.sequence_length, recipe.data.boundaries
    if layout.shards == 1 or layout.copies or packs(config, tokens) or not apart:
        return
    raise InputError(
        f"{_alone(recipe, config)}, which sharded weights do not go with; set this to false, or "
        "parallel.strategy to ddp or zero",
        field="data.boundaries",
        value=True,
    )


def _inspect(source: Source, field: str) -> None:
    try:
        inspect(source)
    except InputError as error:
        raise error.located(field=field) from None


def formed(
    recipe: Recipe, config: DecoderConfig, slots: Iterable[str] = ("linear", "compress")
) -> DecoderConfig:
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
            model = decoder_of(config)
        try:
            forms = method.plan(model, config.forms)
            if forms.blocks and not isinstance(config, ModelConfig):
                problem = "blocks of this type of model are as transformers has them, all alike"
                raise InputError(problem, field="method", value=method.info.name)
        except InputError as error:
            raise error.within(slot) from None
        config = replace(config, forms=forms)
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

    Rank 0 writes the tokenizer, the tokens and their rows into the run folder; the others find them
    written.

    Raises:
        InputError: what is wrong with the data, with file and line.
    """

    def check() -> None:
        progress("reading data", 0, None)

    kept = folder / "tokenizer"
    inputs, tokenizer = ranks.first_alone(lambda: begun(recipe, inputs, kept, progress), check)
    held = tokenized(
        recipe,
        inputs.source,
        inputs.others,
        tokenizer,
        inputs.config.vocabulary_size,
        folder / "data",
        progress=lambda done, total: progress("tokenizing", done, total),
        ranks=ranks,
        check=check,
    )
    parts = rows_of(recipe, held)
    for each in (each for rows in parts.values() for each in rows.parts):
        each.pads_apart = pads_apart(inputs.config, recipe.data.sequence_length)
    train = parts[TRAIN]
    return TextData(
        train=train,
        validation=parts.get(VALIDATION),
        test=parts.get(TEST),
        sampler=sampler_of(recipe, inputs.source, train),
        tokenizer=tokenizer,
        identity=identity_of(inputs.source, held),
        files=tuple(exported_files(kept)),
        counts=counts_of(
            inputs.source,
            [part.counts for part in train.parts],
            [each.train.left_out for each in held],
        ),
    )


def surveyed(recipe: Recipe, inputs: TextInputs) -> dict[str, Any]:
    """What packing will make of the data, and whether that is `exact`.

    Raises:
        InputError: what is wrong with the data, with file and line.
    """
    vocabulary = inputs.config.vocabulary_size
    return survey_of(recipe, inputs.source, inputs.tokenizer, vocabulary)


def begun(
    recipe: Recipe, inputs: TextInputs, kept: Path, progress: StageProgress
) -> tuple[TextInputs, Tokenizer]:
    """The inputs as the run reads them, and its tokenizer.

    Where a chat template may write the date, all of the run has that of its beginning: it may be
    resumed on another day, and must find the same text.

    Args:
        kept: the folder of the run's tokenizer.
    """
    source, others = inputs.source, inputs.others
    if any(each.rows.dated for each in (*parts_of(source), *others.values())):
        now = moment_of(kept)

        def dated(part: Source) -> Source:
            return replace(part, rows=part.rows.written_at(now))

        if isinstance(source, SourceMix):
            source = replace(source, parts=tuple(map(dated, source.parts)))
        else:
            source = dated(source)
        others = {part: dated(other) for part, other in others.items()}
        inputs = replace(inputs, source=source, others=others)
    return inputs, run_tokenizer(recipe, inputs, kept, progress)


def run_tokenizer(
    recipe: Recipe, inputs: TextInputs, kept: Path, progress: StageProgress
) -> Tokenizer:
    """The run's tokenizer: the one kept in the run folder, the model's, or one trained now.

    Of documents that are in the test it learns nothing.
    """
    if (kept / "tokenizer.json").exists():
        return Tokenizer.load(kept)
    tokenizer, rows = inputs.tokenizer, inputs.source.rows
    template = rows.template if rows.conversations else None
    if tokenizer is None:
        total = inputs.source.total_bytes

        def tell(done: int, _: int | None) -> None:
            progress("training tokenizer", min(done, total), total)

        try:
            texts, size = _texts(recipe, inputs), inputs.config.vocabulary_size
            tokenizer = Tokenizer.train(texts, size, tell, template=template)
        except InputError as error:
            raise error.located(field=field_of(inputs.source, 0)) from None
    if template is not None:
        # What is trained by the recipe's template is asked by it afterwards, here and elsewhere.
        tokenizer = tokenizer.with_template(template.source)
    tokenizer.save(kept)
    return tokenizer


def _texts(recipe: Recipe, inputs: TextInputs) -> Iterator[str]:
    """The documents that a new tokenizer learns from: those that are not in the test."""
    draw = draw_of(recipe.data, recipe.training.seed)
    for part in parts_of(inputs.source):
        flags = bytearray()
        if draw.test:
            # As the store draws: of few documents one is in the test whatever its chance.
            count = sum(1 for _ in part.documents())
            flags = draw.flags(count) if count > len(draw.drawn) else flags
        for number, document in enumerate(part.documents()):
            if not flags or PARTS[flags[number]] != TEST:
                yield document.text
