"""What a run will be trained on, for people: the tokens of its rows, and facts about the examples.

The tokens are read back from the batches that the loss sees, not from the files.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from modicum.data.batch import IGNORED
from modicum.data.source_mix import SourceMix
from modicum.data.sources import Source
from modicum.data.text_rows import StoreRows, TextRows
from modicum.data.token_arrays import indexed, mapped

# An answer's end is among its last tokens: templates write a line's end after it.
_LAST = 3


@dataclass(frozen=True)
class RowView:
    """The tokens of a row, and a 1 for each that is trained.

    A document's last token is no input where documents are kept apart, but may be trained; it
    stands here, and padding does not.
    """

    tokens: tuple[int, ...]
    trained: tuple[int, ...]

    def parts(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """Runs of tokens that are all trained, or all not."""
        start = 0
        for end in range(1, len(self.tokens) + 1):
            if end == len(self.tokens) or self.trained[end] != self.trained[start]:
                yield self.tokens[start:end], self.trained[start]
                start = end


def view_of(rows: TextRows, index: int) -> RowView:
    """The tokens of row `index` in order, with what the loss sums of them."""
    batch, width = rows.batch([index]), rows.width(index)
    inputs, labels = batch.input_ids[0, :width].tolist(), batch.labels[0, :width].tolist()
    owners = [0] * width if batch.documents is None else batch.documents[0, :width].tolist()
    tokens: list[int] = []
    trained: list[int] = []
    for place, token in enumerate(inputs):
        follows = place > 0 and owners[place - 1] == owners[place]
        tokens.append(token)
        trained.append(int(follows and labels[place - 1] != IGNORED))
        last = place + 1 == width or owners[place + 1] != owners[place]
        if last and labels[place] != IGNORED:
            tokens.append(labels[place])
            trained.append(1)
    return RowView(tuple(tokens), tuple(trained))


@dataclass(frozen=True)
class DataFacts:
    """Facts about the documents of a run.

    Args:
        shortest, median, longest: their tokens.
        duplicates: those that are the same as an earlier one, token by token.
        empty: left out as there is nothing to learn in them.
        overlap: documents of the validation that are trained on too; None without validation.
        test_overlap: documents of the test that are trained or evaluated on too; None without test.
        unended: whose last trained tokens have no end-of-text token among them: a model learns
            from it not to stop. None for continuous text.
    """

    shortest: int
    median: int
    longest: int
    duplicates: int
    empty: int
    overlap: int | None
    test_overlap: int | None
    unended: int | None

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)


def facts_of(
    source: Source | SourceMix,
    ends: Collection[int],
    train: TextRows,
    validation: TextRows | None,
    test: TextRows | None = None,
) -> DataFacts:
    """Facts about the documents behind prepared rows; reads all of them.

    Args:
        ends: the tokens at which the model stops.
    """
    index = torch.cat([indexed(part.store) for part in train.parts], 1)
    lengths = sorted(index[1].tolist())
    own = Counter(document_digests(train))
    held = [] if validation is None else list(document_digests(validation))
    seen = {*own, *held}
    examples = [part for part in train.parts if part.store.examples]
    untrained = sum(int((indexed(part.store)[3] == 0).sum()) for part in examples)
    return DataFacts(
        lengths[0],
        lengths[len(lengths) // 2],
        lengths[-1],
        sum(own.values()) - len(own),
        untrained + sum(document.blank for document in source.everything()),
        None if validation is None else sum(digest in own for digest in held),
        None if test is None else sum(digest in seen for digest in document_digests(test)),
        sum(sum(_unended(part, ends)) for part in examples) if examples else None,
    )


def _documents(rows: StoreRows) -> Iterator[tuple[int, Tensor]]:
    """The first place and the tokens of each document."""
    tokens = mapped(rows.store.tokens_file, rows.store.token_bytes)
    for first, length in indexed(rows.store)[:2].t().tolist():
        yield first, tokens[first : first + length]


def document_digests(rows: TextRows) -> Iterator[bytes]:
    """One of each document's tokens, in order."""
    for part in rows.parts:
        for _, tokens in _documents(part):
            yield hashlib.blake2b(tokens.numpy().tobytes(), digest_size=16).digest()


def _unended(rows: StoreRows, ends: Collection[int]) -> Iterator[bool]:
    """Of each example with something to learn, whether it lacks an end."""
    flags = mapped(rows.store.trained_file, 1)
    mask = 0xFFFF if rows.store.token_bytes == 2 else 0xFFFFFFFF
    for first, tokens in _documents(rows):
        places = flags[first : first + len(tokens)].nonzero().flatten()[-_LAST:]
        if len(places):
            yield not any(token & mask in ends for token in tokens[places].tolist())
