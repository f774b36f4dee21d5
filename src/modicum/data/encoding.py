"""Documents as token ids, and which of them are trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from modicum.core.errors import InputError
from modicum.data.fitting import Example
from modicum.data.readers import Document
from modicum.data.tokenizer import Tokenizer


class Encoded(NamedTuple):
    """The tokens of a document.

    Args:
        ids: with what the tokenizer puts in front, and the end.
        prompt: how many come before the first one that is trained.
        flags: a byte each, 1 where it is trained; the first never is, as nothing predicts it.
    """

    ids: list[int]
    prompt: int
    flags: bytes

    @property
    def example(self) -> Example:
        """What packing knows of it."""
        return Example(len(self.ids), self.prompt, self.flags.count(1))


def encode(
    tokenizer: Tokenizer, documents: Sequence[Document], model_vocabulary: int | None = None
) -> list[Encoded]:
    """The tokens of documents.

    Of text: prompt and text, each tokenized alone, between begin and end. Of a conversation: those
    of its text as the chat template wrote it, as `transformers` has them.

    Args:
        model_vocabulary: ids must lie below it.

    Raises:
        InputError: one does not; with the document.
    """
    chats = [document for document in documents if document.spans is not None]
    plain = [document for document in documents if document.spans is None]
    marked = iter(_chats(tokenizer, chats))
    stretches = iter(_plain(tokenizer, plain))
    found = [next(stretches if each.spans is None else marked) for each in documents]
    for document, encoded in zip(documents, found, strict=True):
        if model_vocabulary is not None and max(encoded.ids, default=0) >= model_vocabulary:
            raise _beyond(document, encoded.ids, tokenizer, model_vocabulary)
    return found


def _plain(tokenizer: Tokenizer, documents: Sequence[Document]) -> Iterator[Encoded]:
    begin, end = list(tokenizer.begin_ids), tokenizer.eos_id
    texts = tokenizer.encode_batch([document.text for document in documents])
    prompts: list[list[int]] = [[]] * len(documents)
    if any(document.prompt for document in documents):
        prompts = tokenizer.encode_batch([document.prompt or "" for document in documents])
    for prompt, text in zip(prompts, texts, strict=True):
        ids = [*begin, *prompt, *text, end]
        before = len(begin) + len(prompt)
        free = max(before, 1)
        yield Encoded(ids, before, bytes(free) + b"\1" * (len(ids) - free))


def _chats(tokenizer: Tokenizer, documents: Sequence[Document]) -> Iterator[Encoded]:
    texts = [document.text for document in documents]
    spans = [document.spans or () for document in documents]
    for ids, flags in tokenizer.encode_marked(texts, spans):
        flags = b"\0" + flags[1:]
        first = flags.find(1)
        yield Encoded(ids, len(ids) if first < 0 else first, flags)


def _beyond(document: Document, ids: list[int], tokenizer: Tokenizer, size: int) -> InputError:
    worst = next(token for token in ids if token >= size)
    return InputError(
        f"the tokenizer gives token {worst} ({tokenizer.token(worst)!r}) in "
        f"{document.origin}, but the model's vocabulary ends at {size - 1}; "
        "use the tokenizer that belongs to the model, or a larger vocabulary",
        value=worst,
        allowed=f"token ids below {size}",
    )
