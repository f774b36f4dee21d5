"""Text that is streamed: read, tokenized and packed as training asks for it, and nowhere kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from modicum.core.errors import InputError
from modicum.core.progress import StageProgress
from modicum.core.ranks.ranks import Ranks
from modicum.data.example_table import Placing
from modicum.data.fitting import LOOK_AHEAD
from modicum.data.mixed_rows import MixedRows
from modicum.data.parts import TEST, VALIDATION
from modicum.data.readers import Document
from modicum.data.row_stream import RowStream
from modicum.data.rows import RowsOnDemand
from modicum.data.source_mix import SourceMix
from modicum.data.sources import Source
from modicum.data.stream_block import BlockShape
from modicum.data.stream_held import held_rows
from modicum.data.stream_reader import StreamReader
from modicum.data.streamed_rows import StreamedRows, StreamSampler
from modicum.data.text_rows import StoreRows, TextRows
from modicum.data.tokenizer import Tokenizer
from modicum.data.tokenizer_files import exported_files
from modicum.recipe import Recipe
from modicum.tasks.parts import draw_of, field_of_part
from modicum.tasks.text import TextData, TextInputs, begun, pads_apart
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
    inputs, tokenizer = ranks.first_alone(lambda: begun(recipe, inputs, kept, progress), check)
    check()
    shape, seed = shape_of(recipe, inputs, tokenizer), recipe.training.seed
    draw, asked = draw_of(recipe.data, seed), recipe.evaluation
    readers = [StreamReader(part, seed, shape.shuffle, draw) for part in parts_of(inputs.source)]

    def held(part: str, most: int | None) -> TextRows:
        return _held_rows(recipe, inputs, shape, readers, part, most)

    parts = {*inputs.others, *dict(draw.drawn)}
    most = asked.rows if isinstance(asked.rows, int) else None
    weights = inputs.source.weights if isinstance(inputs.source, SourceMix) else None
    rows = StreamedRows([RowStream(reader, shape, ranks) for reader in readers], weights)
    return TextData(
        train=rows,
        validation=held(VALIDATION, most) if VALIDATION in parts else None,
        test=RowsOnDemand(lambda: held(TEST, None)) if TEST in parts else None,
        sampler=StreamSampler(rows, recipe.training.batch_size),
        tokenizer=tokenizer,
        identity={"made_from": _identity(inputs, tokenizer)},
        files=tuple(exported_files(kept)),
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
        pads_apart=pads_apart(inputs.config, data.sequence_length),
    )


def _held_rows(
    recipe: Recipe,
    inputs: TextInputs,
    shape: BlockShape,
    readers: list[StreamReader],
    part: str,
    most: int | None,
) -> TextRows:
    """The rows of a part that is evaluated, in memory; of several sources some of each.

    Args:
        most: so many rows of each source; None: all.
    """
    other, field = inputs.others.get(part), field_of_part(recipe.data, part)
    if other is not None:
        return _held(other.documents(), shape, most, other, field)
    found = [_held(each.held_out(part), shape, most, each.source, field) for each in readers]
    return MixedRows(found) if len(found) > 1 else found[0]


def _held(
    documents: Iterable[Document], shape: BlockShape, rows: int | None, source: Source, field: str
) -> StoreRows:
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
    said = [
        [part.title, [file.name for file in part.files], part.rows.identity, part.piece_bytes]
        for part in (*parts_of(inputs.source), *inputs.others.values())
    ]
    return hashlib.sha256(json.dumps([said, tokenizer.digest]).encode()).hexdigest()


def first_of(recipe: Recipe, inputs: TextInputs) -> tuple[Recipe, TextInputs]:
    """The same recipe on the first documents of each source alone, which are not streamed."""
    parts = [replace(part, limit_documents=SHOWN) for part in parts_of(inputs.source)]
    source = inputs.source
    source = replace(source, parts=tuple(parts)) if isinstance(source, SourceMix) else parts[0]
    others = {part: replace(other, limit_documents=SHOWN) for part, other in inputs.others.items()}
    described = f"{inputs.described}: the first {SHOWN:,} documents"
    made = replace(inputs, source=source, others=others, described=described)
    values = recipe.model_dump(mode="json", exclude_unset=True)
    values["data"] = {
        key: value
        for key, value in values["data"].items()
        if key not in ("streaming", "shuffle_buffer")
    }
    return type(recipe)(**values), made
