"""Documents as token ids, and which of them are trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from modicum.core.errors import InputError
from modicum.data.fitting import Example
from modicum.data.readers import Document
from modicum.data.talks import Talk, shortened
from modicum.data.tokenizer import Tokenizer


class Encoded(NamedTuple):
    """The tokens of a document.

    Args:
        ids: with what the tokenizer puts in front, and the end.
        prompt: how many come before the first one that is trained.
        flags: a byte each, 1 where it is trained; the first never is, as nothing predicts it.
        turns: of a conversation, how many of its earliest turns were left out.
        truncated: whether the user's first turn lost its beginning.
    """

    ids: list[int]
    prompt: int
    flags: bytes
    turns: int = 0
    truncated: bool = False

    @property
    def example(self) -> Example:
        """What packing knows of it."""
        return Example(len(self.ids), self.prompt, self.flags.count(1))


@dataclass
class LeftOut:
    """What is left out of documents before they are packed.

    Args:
        empty: documents with nothing in them to learn, such as a blank answer.
        shortened: conversations without their earliest turns.
        turns: how many these are.
        truncated: conversations in which the user's first turn lost its beginning.
    """

    empty: int = 0
    shortened: int = 0
    turns: int = 0
    truncated: int = 0

    def shorten(self, encoded: Encoded) -> None:
        """Count a conversation that may have been shortened."""
        self.shortened += encoded.turns > 0
        self.turns += encoded.turns
        self.truncated += encoded.truncated

    @classmethod
    def summed(cls, each: Iterable[LeftOut]) -> LeftOut:
        """What is left out of several sources together."""
        return cls(*map(sum, zip(*(vars(one).values() for one in each), strict=True)))

    def scaled(self, factor: float) -> LeftOut:
        """So much of it."""
        return LeftOut(**{name: round(value * factor) for name, value in vars(self).items()})

    def in_counts(self, counts: Mapping[str, Any]) -> dict[str, Any]:
        """The counts of packing with these."""
        return {
            **counts,
            "truncated": counts["truncated"] + self.truncated,
            "empty": self.empty,
            "shortened": self.shortened,
            "turns_left_out": self.turns,
        }


def encode(
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    model_vocabulary: int | None = None,
    room: int | None = None,
) -> list[Encoded]:
    """The tokens of documents.

    Of text: prompt and text, each tokenized alone, between begin and end. Of a conversation: those
    of its text as the chat template wrote it, as `transformers` has them.

    Args:
        model_vocabulary: ids must lie below it.
        room: a conversation of more tokens is shortened to these, if that is possible (`talks`).

    Raises:
        InputError: one does not; with the document.
    """
    chats = [document for document in documents if document.spans is not None]
    plain = [document for document in documents if document.spans is None]
    marked = iter(_chats(tokenizer, chats, room))
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


def _chats(
    tokenizer: Tokenizer, documents: Sequence[Document], room: int | None
) -> Iterator[Encoded]:
    texts = [document.text for document in documents]
    spans = [document.spans or () for document in documents]
    encoded = tokenizer.encode_marked(texts, spans)
    for document, (ids, flags) in zip(documents, encoded, strict=True):
        if room is not None and len(ids) > room and document.talk is not None:
            yield _shorter(tokenizer, document, document.talk, room) or _marked(ids, flags)
        else:
            yield _marked(ids, flags)


def _marked(ids: list[int], flags: bytes) -> Encoded:
    flags = b"\0" + flags[1:]
    first = flags.find(1)
    return Encoded(ids, len(ids) if first < 0 else first, flags)


def _shorter(tokenizer: Tokenizer, document: Document, talk: Talk, room: int) -> Encoded | None:
    """A conversation's tokens where it is shortened to at most `room`; None if it cannot be."""

    def tokens(shorter: Talk) -> tuple[list[int], bytes]:
        text, spans = shorter.written()
        return tokenizer.encode_marked([text], [spans])[0]

    try:
        found = shortened(talk, lambda shorter: len(tokens(shorter)[0]) <= room)
        if found is None:
            return None
        ids, prompt, flags, *_ = _marked(*tokens(found.talk))
    except InputError as error:
        raise error.located(file=document.origin) from None
    return Encoded(ids, prompt, flags, found.turns, found.truncated)


def _beyond(document: Document, ids: list[int], tokenizer: Tokenizer, size: int) -> InputError:
    worst = next(token for token in ids if token >= size)
    return beyond(worst, tokenizer.token(worst), document.origin, size)


def beyond(token: int, word: str | None, origin: str, size: int) -> InputError:
    """The error of a token of a text that a model's vocabulary does not have."""
    return InputError(
        f"the tokenizer gives token {token} ({word!r}) in {origin}, but the model's vocabulary "
        f"ends at {size - 1}; use the tokenizer that belongs to the model, or a larger vocabulary",
        value=token,
        allowed=f"token ids below {size}",
    )
