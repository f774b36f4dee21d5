"""How many rows and tokens a source will make, counted or estimated before a run prepares it.

A process that plans many recipes on the same files, as a comparison does, reads them once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import compress

from modicum.data.encoding import LeftOut, encode
from modicum.data.fitting import Example, Fitting, PackingCounts, TooLong, row_room
from modicum.data.parts import Draw
from modicum.data.readers import Document
from modicum.data.row_formats import RowFormat
from modicum.data.sources import Source
from modicum.data.tokenizer import Tokenizer

# So much text is looked at: a second or so. Most files of examples are smaller.
SURVEYED_BYTES = 2_000_000
# A tokenizer that is still to be trained is guessed by one that is trained on so much.
TRAINED_ON_BYTES = 500_000
_NOTHING = Draw()
_KEPT = 16  # surveys that are known in this process


@dataclass(frozen=True)
class DataSurvey:
    """What packing will make of a source, `exact` where all of it was read as the run will."""

    counts: PackingCounts
    left_out: LeftOut
    exact: bool


def survey(
    source: Source,
    tokenizer: Tokenizer | None,
    *,
    vocabulary_size: int,
    sequence_length: int,
    boundaries: bool,
    too_long: TooLong,
    draw: Draw = _NOTHING,
    most_bytes: int = SURVEYED_BYTES,
) -> DataSurvey:
    """Count the rows of the documents that will be trained, of the first `most_bytes`.

    What follows after these is taken to be like them.

    Args:
        tokenizer: None where one is to be trained on the data; one of `vocabulary_size` tokens is
            trained on the first half megabyte then, which finds a little too few tokens.
        draw: the documents that will be held out.

    Raises:
        InputError: anything that the source says.
    """
    key = (
        _identity(source),
        None if tokenizer is None else tokenizer.digest,
        (vocabulary_size, sequence_length, boundaries, too_long, draw, most_bytes),
    )
    if key not in _KNOWN:
        while len(_KNOWN) >= _KEPT:
            _KNOWN.popitem(last=False)
        _KNOWN[key] = _surveyed(
            source,
            tokenizer,
            vocabulary_size=vocabulary_size,
            sequence_length=sequence_length,
            boundaries=boundaries,
            too_long=too_long,
            draw=draw,
            most_bytes=most_bytes,
        )
    _KNOWN.move_to_end(key)
    found = _KNOWN[key]
    return replace(found, left_out=replace(found.left_out))


_KNOWN: OrderedDict[Hashable, DataSurvey] = OrderedDict()


def _identity(source: Source) -> Hashable:
    """All that decides what a source's documents are, as far as the files' facts tell."""
    stamps: list[tuple[int, ...] | None] = []
    for file in source.files:
        try:
            about = file.path.stat()
        except OSError:  # whoever reads it says what is wrong
            stamps.append(None)
        else:
            stamps.append((about.st_size, about.st_mtime_ns, about.st_ino))
    plain = replace(source, rows=RowFormat())
    return repr(plain), tuple(source.rows.identity), tuple(stamps)


def _surveyed(
    source: Source,
    tokenizer: Tokenizer | None,
    *,
    vocabulary_size: int,
    sequence_length: int,
    boundaries: bool,
    too_long: TooLong,
    draw: Draw,
    most_bytes: int,
) -> DataSurvey:
    documents, blank, complete = _first(source, most_bytes)
    exact = complete and tokenizer is not None
    if tokenizer is None:
        some, size = [], 0
        for document in documents:
            size += len(document.text)
            some.append(document.text)
            if size > TRAINED_ON_BYTES:
                break
        template = source.rows.template if source.rows.conversations else None
        tokenizer = Tokenizer.train(iter(some), vocabulary_size, template=template)
    share = 1.0
    seen = sum(document.size for document in documents)
    if complete and len(documents) > len(draw.drawn):
        flags = draw.flags(len(documents))
        documents = list(compress(documents, (not flag for flag in flags)))
    else:
        share = draw.trained
    if not complete:
        share *= max(1.0, source.total_bytes / max(seen, 1))
    room = row_room(sequence_length, boundaries) if too_long == "truncate" else None
    encoded = encode(tokenizer, documents, room=room)
    examples = [each.example for each in encoded]
    left_out = LeftOut(blank)
    if source.continuous:
        counts = _continuous(examples, sequence_length)
    else:
        fitting = Fitting(sequence_length, boundaries, too_long, len(tokenizer.begin_ids))
        fitting.fit(enumerate(examples))
        counts = _fitted(fitting, examples)
        left_out.empty += sum(not example.trained for example in examples)
        for each in encoded:
            left_out.shorten(each)
    if not exact:
        counts, left_out = _scaled(counts, share), left_out.scaled(share)
    return DataSurvey(counts, left_out, exact)


def _first(source: Source, most_bytes: int) -> tuple[list[Document], int, bool]:
    """The documents of the first `most_bytes`, how many are blank, whether those are all."""
    documents: list[Document] = []
    size = blank = 0
    for document in source.everything():
        if documents and size + document.size > most_bytes:
            return documents, blank, False
        if document.blank:
            blank += 1
        else:
            documents.append(document)
            size += document.size
    return documents, blank, True


def _continuous(examples: Sequence[Example], sequence_length: int) -> PackingCounts:
    tokens = sum(example.length for example in examples)
    rows = -(-tokens // sequence_length)
    trained = sum(example.trained for example in examples)
    return PackingCounts(len(examples), rows, rows * sequence_length, tokens, trained)


def _fitted(fitting: Fitting, examples: Sequence[Example]) -> PackingCounts:
    return PackingCounts(
        len(examples),
        fitting.rows,
        fitting.rows * fitting.sequence_length,
        fitting.filled,
        fitting.trained,
        fitting.truncated,
        fitting.split,
        fitting.dropped,
    )


def _scaled(counts: PackingCounts, factor: float) -> PackingCounts:
    values = {name: round(value * factor) for name, value in vars(counts).items()}
    return PackingCounts(**values | {"rows": max(values["rows"], int(counts.rows > 0))})
