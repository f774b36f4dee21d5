"""The sources of a run on text, each tokenized and packed by itself, and put together.

Rank 0 tokenizes and packs; the other ranks map the files that it leaves, and read of them the rows
that are theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from modicum.core.errors import InputError
from modicum.core.files import file_digest
from modicum.core.progress import CountProgress
from modicum.core.ranks.ranks import Ranks
from modicum.data.encoding import LeftOut
from modicum.data.example_table import ExampleTable, Placing
from modicum.data.fitting import PackingCounts, row_room
from modicum.data.mixed_order import MixedSampler, quotas
from modicum.data.mixed_rows import MixedRows, source_shares, summed
from modicum.data.packed_examples import PackedExamples
from modicum.data.packing import Packed
from modicum.data.sampler import Sampler
from modicum.data.source_mix import SourceMix
from modicum.data.sources import Source
from modicum.data.store import prepare
from modicum.data.survey import SURVEYED_BYTES, survey
from modicum.data.text_rows import StoreRows, TextRows
from modicum.data.token_store import MANIFEST, Prepared, TokenStore, written
from modicum.data.tokenizer import Tokenizer
from modicum.recipe import Recipe
from modicum.tasks.parts import draw_of

AnySource = Source | SourceMix


def parts_of(source: AnySource) -> tuple[Source, ...]:
    """The sources, of one or of several."""
    return source.parts if isinstance(source, SourceMix) else (source,)


def field_of(source: AnySource, number: int) -> str:
    """The recipe's field that names a source."""
    return f"data.sources.{number}.path" if isinstance(source, SourceMix) else "data.path"


def tokenized(
    recipe: Recipe,
    source: AnySource,
    others: Mapping[str, Source],
    tokenizer: Tokenizer,
    vocabulary: int,
    folder: Path,
    *,
    progress: CountProgress,
    ranks: Ranks,
    check: Callable[[], None],
) -> list[Prepared]:
    """All text as tokens and rows in files below `folder`, which rank 0 writes; of each source.

    Args:
        others: data of their own that parts have.

    Raises:
        InputError: what is wrong with the data, with file and line.
    """
    total = sum(each.total_bytes for each in (source, *others.values()))

    def work() -> list[str]:
        done, digests = 0, []
        for number, part in enumerate(parts_of(source)):
            # Other data to evaluate on is tokenized once, with the first source.
            own = others if number == 0 else {}
            place, tell = _folder(folder, source, number), _after(progress, done, total)
            try:
                made = _prepared(recipe, part, own, tokenizer, vocabulary, place, progress=tell)
            except InputError as error:
                which = part.title if isinstance(source, SourceMix) else None
                raise error.located(
                    field=field_of(source, number), file=error.file or which
                ) from None
            done += sum(each.total_bytes for each in (part, *own.values()))
            digests.append(file_digest(made.train.folder / MANIFEST))
        return digests

    digests = ranks.broadcast(ranks.first_alone(lambda: work() if ranks.first else [], check))
    return [
        written(_folder(folder, source, number), digest) for number, digest in enumerate(digests)
    ]


def _prepared(
    recipe: Recipe,
    source: Source,
    others: Mapping[str, Source],
    tokenizer: Tokenizer,
    vocabulary: int,
    folder: Path,
    *,
    progress: CountProgress,
) -> Prepared:
    """One source as tokens and rows in files."""
    data = recipe.data
    room = row_room(data.sequence_length, data.boundaries)
    made = prepare(
        source,
        tokenizer,
        folder,
        model_vocabulary=vocabulary,
        others=others,
        draw=draw_of(data, recipe.training.seed),
        longest=room if data.too_long == "refuse" else None,
        room=room if data.too_long == "truncate" else None,
        progress=progress,
    )
    for store in made.parts.values():
        packed(recipe, store)
    return made


def _after(progress: CountProgress, done: int, total: int) -> CountProgress:
    """Progress of a source before which `done` of `total` bytes were tokenized."""
    return lambda now, _: progress(min(done + now, total), total)


def _folder(folder: Path, source: AnySource, number: int) -> Path:
    return folder / str(number) if isinstance(source, SourceMix) else folder


def packed(recipe: Recipe, store: TokenStore, *, check: bool = True) -> StoreRows:
    """The rows of a store: examples in one piece each, continuous text end to end.

    Args:
        check: False where rank 0 has just made the table of its rows.

    Raises:
        InputError: nothing in it is trained.
    """
    data = recipe.data
    if not store.examples:
        return Packed(store, data.sequence_length, data.boundaries)
    placing = Placing(data.sequence_length, data.boundaries, data.too_long, recipe.training.seed)
    table = ExampleTable.kept(store, placing, check=check)
    return PackedExamples(store, data.sequence_length, data.boundaries, table=table)


def rows_of(recipe: Recipe, held: Sequence[Prepared]) -> dict[str, TextRows]:
    """The rows of all sources, of each part that there is.

    Raises:
        InputError: nothing in a source is trained.
    """
    found: dict[str, list[StoreRows]] = {}
    for part, store in (pair for each in held for pair in each.parts.items()):
        found.setdefault(part, []).append(packed(recipe, store, check=False))
    return {part: MixedRows(rows) if len(rows) > 1 else rows[0] for part, rows in found.items()}


def sampler_of(recipe: Recipe, source: AnySource, train: TextRows) -> Sampler:
    """The order of the rows.

    Raises:
        InputError: a weight is so small that its source gives no row.
    """
    training = recipe.training
    if isinstance(train, MixedRows) and isinstance(source, SourceMix):
        return MixedSampler(train.places, source.weights, training.batch_size, training.seed)
    return Sampler(len(train), training.batch_size, training.seed)


def identity_of(source: AnySource, held: Sequence[Prepared]) -> dict[str, Any]:
    """What a run that resumes must find again."""
    digests = [file_digest(each.train.folder / MANIFEST) for each in held]
    return {"made_from": digests if isinstance(source, SourceMix) else digests[0]}


def counts_of(
    source: AnySource, counts: Sequence[PackingCounts], left_out: Sequence[LeftOut]
) -> Mapping[str, Any]:
    """What a plan and run.json have of the data; of several sources, what each gives too."""
    known = LeftOut.summed(left_out).in_counts(summed(counts).as_json())
    known |= {"conversations": source.rows.conversations}
    if not isinstance(source, SourceMix):
        return known
    given = quotas([each.rows for each in counts], source.weights)
    return {**known, "sources": source_shares(source.names, counts, given)}


def surveyed(
    recipe: Recipe, source: AnySource, tokenizer: Tokenizer | None, vocabulary: int
) -> dict[str, Any]:
    """What packing will make of the data, and whether that is `exact`.

    Raises:
        InputError: what is wrong with the data, with file and line.
    """
    data, parts = recipe.data, parts_of(source)
    if any(part.hub is not None for part in parts):
        return {"streamed": True}  # nobody knows how much there is
    found, left = [], SURVEYED_BYTES
    for number, part in enumerate(parts):
        most = left // (len(parts) - number)
        left -= min(most, part.total_bytes)
        try:
            found.append(
                survey(
                    part,
                    tokenizer,
                    vocabulary_size=vocabulary,
                    sequence_length=data.sequence_length,
                    boundaries=data.boundaries,
                    too_long=data.too_long,
                    draw=draw_of(data, recipe.training.seed),
                    most_bytes=most,
                )
            )
        except InputError as error:
            raise error.located(field=field_of(source, number)) from None
    left_out = [each.left_out for each in found]
    counts = counts_of(source, [each.counts for each in found], left_out)
    if data.streaming:
        return {**counts, "exact": False, "streamed": True}
    return {**counts, "exact": all(each.exact for each in found)}
