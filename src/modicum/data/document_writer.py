"""Documents as ids in files, or in memory, with what packing has to know of each."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from modicum.core.errors import InputError
from modicum.data.encoding import Encoded, LeftOut, encode
from modicum.data.parts import PARTS, TRAIN
from modicum.data.readers import Document
from modicum.data.tokenizer import Tokenizer

# So much text is tokenized at a time, and at most so many documents: bounds the scratch memory.
_BATCH_BYTES, _BATCH_DOCUMENTS = 1 << 20, 1024


@dataclass
class DocumentWriter:
    """Appends documents' ids to a file and remembers where each begins, in 16 bytes a document.

    Args:
        handle: takes the ids, of `token_bytes` each.
        flags: takes a byte a token, 1 where it is trained; None for continuous text.
        model_vocabulary: ids must lie below it.
        room: a conversation of more tokens loses its earliest turns.
        longest: an example of more tokens is refused.
    """

    handle: BinaryIO
    flags: BinaryIO | None
    tokenizer: Tokenizer
    model_vocabulary: int
    room: int | None
    longest: int | None = None
    bytes: int = 0
    lengths: array[int] = field(default_factory=lambda: array("q"))
    prompts: array[int] = field(default_factory=lambda: array("I"))
    trained: array[int] = field(default_factory=lambda: array("I"))
    # Few documents are shortened, by number; blank ones have none, and are of their source's part.
    shortened: dict[int, Encoded] = field(default_factory=dict)
    blank: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))

    @property
    def documents(self) -> int:
        return len(self.lengths)

    @property
    def token_bytes(self) -> int:
        return 2 if self.model_vocabulary <= 1 << 16 else 4

    def write(self, documents: Iterable[Document], part: str = TRAIN) -> Iterator[int]:
        """Tokenize and append all documents; gives the bytes done so far now and then.

        Args:
            part: what the source is read for.

        Raises:
            InputError: a token id that the model has no row for; an example that is too long.
        """
        batch: list[Document] = []
        size = 0
        for document in documents:
            if document.blank:
                self.blank[part] += 1
                continue
            batch.append(document)
            size += document.size
            if size >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
                self._append(batch)
                yield self.bytes
                batch, size = [], 0
        if batch:
            self._append(batch)
            yield self.bytes

    def _append(self, batch: list[Document]) -> None:
        encoded = encode(self.tokenizer, batch, self.model_vocabulary, self.room)
        for document, each in zip(batch, encoded, strict=True):
            if self.longest is not None and len(each.ids) > self.longest:
                raise _too_long(document, len(each.ids), self.longest)
            array("H" if self.token_bytes == 2 else "I", each.ids).tofile(self.handle)
            if self.flags is not None:
                self.flags.write(each.flags)
            if each.turns or each.truncated:
                self.shortened[self.documents] = each
            self.lengths.append(len(each.ids))
            self.prompts.append(each.prompt)
            self.trained.append(each.flags.count(1))
            self.bytes += document.size

    def left_out(self, flags: bytearray, examples: Mapping[str, bool]) -> dict[str, LeftOut]:
        """What each part lacks.

        Args:
            flags: of each document, the place of its part in `PARTS`.
            examples: whether the documents of a part are examples.
        """
        found = {part: LeftOut(number) for part, number in self.blank.items()}
        for flag, trained in zip(flags, self.trained, strict=True):
            found[PARTS[flag]].empty += examples[PARTS[flag]] and not trained
        for number, encoded in self.shortened.items():
            found[PARTS[flags[number]]].shorten(encoded)
        return found

    def write_index(self, path: Path, flags: bytearray, flag: int) -> dict[str, Any]:
        """Write the index of the documents whose flag is `flag`; its documents and tokens."""
        index, first, documents, tokens = array("q"), 0, 0, 0
        columns = zip(flags, self.lengths, self.prompts, self.trained, strict=True)
        for mine, length, prompt, trained in columns:
            if mine == flag:
                index.extend((first, length, prompt, trained))
                documents, tokens = documents + 1, tokens + length
            first += length
        path.write_bytes(index.tobytes())
        return {"documents": documents, "tokens": tokens}


def _too_long(document: Document, length: int, longest: int) -> InputError:
    return InputError(
        f"the example in {document.origin} has {length} tokens, more than a row holds; raise "
        "data.sequence_length, or set data.too_long to truncate, split or drop",
        field="data.too_long",
        value="refuse",
        allowed=f"examples of at most {longest} tokens",
    )
