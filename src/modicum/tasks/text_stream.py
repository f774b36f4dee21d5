"""Text that is streamed: read, tokenized and packed as training asks for it, and nowhere kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from modicum.core.errors import InputError
from modicum.core.progress import StageProgress
from modicum.core.ranks.ranks import Ranks
from modicum.data.example_table import Placing
from modicum.data.fitting import LOOK_AHEAD
from modicum.data.mixed_rows import MixedRows
from modicum.data.readers import Document
from modicum.data.row_stream import RowStream
from modicum.data.source_mix import SourceMix
from modicum.data.sources import Source
from modicum.data.stream_block import BlockShape
from modicum.data.stream_held import held_rows
from modicum.data.stream_reader import StreamReader
from modicum.data.streamed_rows import StreamedRows, StreamSampler
from modicum.data.text_rows import TextRows
from modicum.data.tokenizer import Tokenizer
from modicum.recipe import Recipe
from modicum.tasks.text import TextData, TextInputs, run_tokenizer
from modicum.tasks.text_parts import parts_of

# So many documents of a stream are looked at where rows and facts are shown.
SHOWN = 1000


def streamed(
    recipe: Recipe, inputs: TextInputs, folder: Path, progress: StageProgress, ranks: Ranks
) -> TextData:
    """Open all text, and read what is evaluated; of the run folder the tokenizer alone is written.

    Raises:
        InputError: what is wrong with the documents to evaluate on, with file and line.
    """

    def check() -> None:
        progress("reading data", 0, None)

    kept = folder / "tokenizer"
    tokenizer = ranks.first_alone(lambda: run_tokenizer(inputs, kept, progress), check)
    check()
    shape, own = shape_of(recipe, inputs, tokenizer), inputs.validation_source is None
    fraction = recipe.data.validation_fraction if own else 0.0
    readers = [
        StreamReader(part, recipe.training.seed, shape.shuffle, fraction)
        for part in parts_of(inputs.source)
    ]
    weights = inputs.source.weights if isinstance(inputs.source, SourceMix) else None
    rows = StreamedRows([RowStream(reader, shape, ranks) for reader in readers], weights)
    return TextData(
        train=rows,
        validation=_validation(recipe, inputs, shape, readers),
        sampler=StreamSampler(rows, recipe.training.batch_size),
        tokenizer=tokenizer,
        identity={"made_from": _identity(inputs, tokenizer)},
        files=tuple(sorted(kept.glob("*"))),
        counts={"streamed": True},
    )


def shape_of(recipe: Recipe, inputs: TextInputs, tokenizer: Tokenizer) -> BlockShape:
    """How a recipe's documents become blocks."""
    data, seed = recipe.data, recipe.training.seed
    buffer = data.shuffle_buffer or LOOK_AHEAD
    return BlockShape(
        Placing(data.sequence_length, data.boundaries, data.too_long, seed),
        tokenizer,
        inputs.config.vocabulary_size,
        buffer if buffer > 1 else LOOK_AHEAD,
        shuffle=buffer > 1,
    )


def _validation(
    recipe: Recipe, inputs: TextInputs, shape: BlockShape, readers: list[StreamReader]
) -> TextRows | None:
    """The rows that are evaluated, in memory; of several sources some of each."""
    rows, other = recipe.evaluation.rows, inputs.validation_source
    if other is not None:
        found = [_held(other.documents(), shape, rows, other, "data.validation_path")]
    elif recipe.data.validation_fraction:
        found = [
            _held(each.held_out(), shape, rows, each.source, "data.validation_fraction")
            for each in readers
        ]
    else:
        return None
    return MixedRows(found) if len(found) > 1 else found[0]


def _held(
    documents: Iterable[Document], shape: BlockShape, rows: int, source: Source, field: str
) -> Any:
    try:
        found = held_rows(documents, shape, rows, continuous=source.continuous)
    except InputError as error:
        raise error.located(field=field) from None
    if found is None:
        problem = "none of the documents to evaluate on has a token to learn; give more of them"
        raise InputError(problem, file=source.title, field=field)
    return found


def _identity(inputs: TextInputs, tokenizer: Tokenizer) -> str:
    """SHA-256, in hexadecimal, of what a run that resumes must find: files' names, how they become
    tokens. What is in them is compared block by block."""
    parts = [*parts_of(inputs.source), inputs.validation_source]
    said = [
        [part.title, [file.name for file in part.files], part.rows.identity, part.piece_bytes]
        for part in parts
        if part is not None
    ]
    return hashlib.sha256(json.dumps([said, tokenizer.digest]).encode()).hexdigest()


def first_of(recipe: Recipe, inputs: TextInputs) -> tuple[Recipe, TextInputs]:
    """The same recipe on the first documents of each source alone, which are not streamed."""
    parts = [replace(part, limit_documents=SHOWN) for part in parts_of(inputs.source)]
    source = inputs.source
    source = replace(source, parts=tuple(parts)) if isinstance(source, SourceMix) else parts[0]
    other = inputs.validation_source
    if other is not None:
        other = replace(other, limit_documents=SHOWN)
    described = f"{inputs.described}: the first {SHOWN:,} documents"
    made = replace(inputs, source=source, validation_source=other, described=described)
    values = recipe.model_dump(mode="json", exclude_unset=True)
    values["data"] = {
        key: value
        for key, value in values["data"].items()
        if key not in ("streaming", "shuffle_buffer")
    }
    return type(recipe)(**values), made
