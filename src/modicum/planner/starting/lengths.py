"""How long the documents of a source are, in tokens, by its first two megabytes."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from modicum.data.chat_template import ChatTemplate
from modicum.data.encoding import encode
from modicum.data.readers import Document
from modicum.data.source_mix import SourceMix
from modicum.data.sources import Source
from modicum.data.survey import SURVEYED_BYTES, TRAINED_ON_BYTES
from modicum.data.tokenizer import Tokenizer

# Rows are made of so many tokens at least, in steps of so many: short examples are packed.
LEAST, STEP = 64, 64
# A row holds so many of the examples in one piece; what is longer is truncated.
HELD = 0.99


@dataclass(frozen=True)
class Lengths:
    """Tokens of each document that was looked at, sorted, and how many documents there are.

    Args:
        documents: of the source; an estimate unless `exact`.
        left_out: whether some were not counted, as nothing is to be learned in them.
    """

    tokens: tuple[int, ...]
    documents: int
    exact: bool
    left_out: bool = False

    def quantile(self, part: float) -> int:
        """The tokens that this part of the documents have at most."""
        return self.tokens[min(len(self.tokens) - 1, int(part * len(self.tokens)))]

    def longer(self, tokens: int) -> float:
        """The part of the documents that have more tokens."""
        return 1 - bisect_right(self.tokens, tokens) / len(self.tokens)


def sampled(source: Source | SourceMix) -> tuple[list[Document], bool]:
    """The documents of the first two megabytes, and whether those are all.

    Raises:
        InputError: anything that the source says.
    """
    documents: list[Document] = []
    size = 0
    for document in source.documents():
        if documents and size + document.size > SURVEYED_BYTES:
            return documents, False
        documents.append(document)
        size += document.size
    return documents, True


def measured(
    source: Source | SourceMix, tokenizer: Tokenizer | None, vocabulary_size: int
) -> tuple[Lengths, Tokenizer]:
    """The lengths of a source's documents, and the tokenizer that they were counted with.

    Args:
        tokenizer: None where a run trains one on the data; one of `vocabulary_size` tokens is
            trained on a little of it then.

    Raises:
        InputError: anything that the source says.
    """
    documents, complete = sampled(source)
    if tokenizer is None:
        template = source.rows.template if source.rows.conversations else None
        tokenizer = _guessed(documents, vocabulary_size, template)
    encoded = list(encode(tokenizer, documents))
    # A run leaves out documents in which nothing is to be learned, and so `modicum data` does.
    kept = [each for each in encoded if each.example.trained] or encoded
    tokens, count = sorted(len(each.ids) for each in kept), len(kept)
    if not complete:
        seen = sum(document.size for document in documents)
        about = count * max(1.0, source.total_bytes / max(seen, 1))
        count = int(float(f"{about:.2g}"))  # no more digits than it deserves
    return Lengths(tuple(tokens), count, complete, len(kept) < len(encoded)), tokenizer


def _guessed(
    documents: list[Document], vocabulary_size: int, template: ChatTemplate | None
) -> Tokenizer:
    # Without the template its marks would count as many tokens each, not as one.
    some, size = [], 0
    for document in documents:
        some.append(document.text[:TRAINED_ON_BYTES])
        size += len(document.text)
        if size > TRAINED_ON_BYTES:
            break
    return Tokenizer.train(iter(some), vocabulary_size, template=template)


def row_length(lengths: Lengths, context: int | None, unit: str = "documents") -> tuple[int, str]:
    """Tokens in a row of examples, and why.

    >>> row_length(Lengths((20, 30, 130), 3, True), 2048)
    (192, '99 % of the documents have at most 130 tokens, the longest 130')
    """
    wanted, longest = lengths.quantile(HELD), lengths.tokens[-1]
    length = max(LEAST, -(-wanted // STEP) * STEP)
    why = f"99 % of the {unit} have at most {wanted:,} tokens, the longest {longest:,}"
    if context is not None and length > context:
        longer = lengths.longer(context)
        return context, f"the model's context; {longer:.1%} of the {unit} are longer"
    return length, why


def text_length(tokens: int, context: int | None, most: int) -> tuple[int, str]:
    """Tokens in a row of continuous text, and why.

    Args:
        tokens: of all the text, about.
        most: no row is longer.
    """
    bound = most if context is None else min(most, context)
    length = bound
    while length > LEAST and tokens // length < LEAST:
        length //= 2
    if length < bound:
        return length, "continuous text, split wherever a row ends; short, as there is little of it"
    return length, "continuous text, split wherever a row ends; longer rows see more before a token"
