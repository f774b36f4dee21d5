"""The token cache: all of a source as ids on disk, written once, trusted only when complete.

A store folder holds `tokens.bin` (every document's ids, one after the other, each document ended
by the end-of-text token), of examples `trained.bin` (a byte a token, 1 where it is trained), one
index file a side (`train.bin`, `validation.bin`: of each document, as int64, its first place in
tokens.bin, its length, how many of its tokens are prompt, and how many are trained), and
`manifest.json` with the digests of these files and of all that they were made from. The folder
appears by one rename, so a death at any moment leaves the old one, or none. Imports no torch.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from modicum.core.errors import InputError
from modicum.core.files import file_digest, publish_folder, write_json
from modicum.core.progress import CountProgress
from modicum.data.encoding import Encoded, LeftOut, encode
from modicum.data.readers import Document
from modicum.data.sources import Source
from modicum.data.token_store import MANIFEST, TOKENS, TRAINED, Prepared, checked, described
from modicum.data.tokenizer import Tokenizer

_FORMAT = 3
# So much text is tokenized at a time, and at most so many documents: bounds the scratch memory.
_BATCH_BYTES, _BATCH_DOCUMENTS = 1 << 20, 1024


def prepare(
    source: Source,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    model_vocabulary: int,
    validation_source: Source | None = None,
    validation_fraction: float = 0.0,
    seed: int = 0,
    longest: int | None = None,
    room: int | None = None,
    progress: CountProgress | None = None,
) -> Prepared:
    """Tokenize all of `source` into `folder`, or find that this was done before.

    Whatever `folder` held is replaced. Validation documents are those of `validation_source`, or
    without one a fraction of the documents, each drawn by (seed, its number) alone; at least one
    document falls on each side. `progress` is called with bytes done and in all.

    Args:
        longest: an example of more tokens is refused.
        room: a conversation of more tokens loses its earliest turns.

    Raises:
        InputError: anything that the source says; a token id that the model has no row for; an
            example that is too long; too few documents to hold one out; a full disk.
    """
    drawn = validation_source is None and validation_fraction > 0
    made_from = {
        "format": _FORMAT,
        "byte_order": sys.byteorder,
        "source": source.fingerprint(),
        "validation_source": validation_source.fingerprint() if validation_source else None,
        "validation_draw": [validation_fraction, seed] if drawn else None,
        "tokenizer": tokenizer.digest,
        "model_vocabulary": model_vocabulary,
        "longest": longest,
        "room": room,
    }
    if (known := checked(folder, made_from)) is not None:
        return known
    sources = [source, *([validation_source] if validation_source else [])]
    total = sum(each.total_bytes for each in sources)
    examples = {"train": not source.continuous, "validation": not sources[-1].continuous}
    with publish_folder(folder) as temporary:
        with ExitStack() as stack:
            tokens = stack.enter_context(open(temporary / TOKENS, "wb"))
            flags = None
            if any(examples.values()):
                flags = stack.enter_context(open(temporary / TRAINED, "wb"))
            writer = _Writer(tokens, flags, tokenizer, model_vocabulary, room)
            ends = []
            for each in sources:
                writer.longest = None if each.continuous else longest
                for done in writer.write(each):
                    if progress is not None:
                        progress(min(done, total), total)
                ends.append(writer.documents)
        if drawn:
            validation = held_out(writer.documents, validation_fraction, seed)
        else:
            validation = bytearray(ends[0]) + bytearray(b"\1") * (writer.documents - ends[0])
        left_out = writer.left_out(validation, examples)
        sides = {"train": 0, **({"validation": 1} if any(validation) else {})}
        manifest: dict[str, Any] = {
            "made_from": made_from,
            "bytes": writer.bytes,
            "token_bytes": writer.token_bytes,
            "begin": len(tokenizer.begin_ids),
            "sides": {
                side: writer.write_index(temporary / f"{side}.bin", validation, flag)
                | {"examples": examples[side], "left_out": vars(left_out[side])}
                for side, flag in sides.items()
            },
        }
        names = [TOKENS, *([TRAINED] if flags else []), *(f"{side}.bin" for side in sides)]
        manifest["files"] = {name: file_digest(temporary / name) for name in names}
        write_json(temporary / MANIFEST, manifest)
    if progress is not None:
        progress(total, total)
    return described(folder, manifest, reused=False)


def held_out(documents: int, fraction: float, seed: int) -> bytearray:
    """A flag a document: 1 is validation. At least one each way, the likeliest when none fell."""
    if documents < 2:
        raise InputError(
            "there is only one document, so none can be held out for validation; set the "
            "validation fraction to 0, name a validation file, or give more documents",
            field="data.validation_fraction",
            value=fraction,
        )

    def chance(index: int) -> int:
        digest = hashlib.sha256(f"{seed}/validation/{index}".encode()).digest()
        return int.from_bytes(digest[:8], "little")

    bar = int(fraction * 2**64)
    flags = bytearray(chance(index) < bar for index in range(documents))
    if not any(flags):
        flags[min(range(documents), key=chance)] = 1
    elif all(flags):
        flags[max(range(documents), key=chance)] = 0
    return flags


@dataclass
class _Writer:
    """Appends documents' ids to a file and remembers where each begins, in 16 bytes a document."""

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
    # Few documents are shortened, by number; blank ones have none, and are those of each source.
    shortened: dict[int, Encoded] = field(default_factory=dict)
    blank: list[int] = field(default_factory=list)

    @property
    def documents(self) -> int:
        return len(self.lengths)

    @property
    def token_bytes(self) -> int:
        return 2 if self.model_vocabulary <= 1 << 16 else 4

    def write(self, source: Source) -> Iterator[int]:
        """Tokenize and append all documents; gives the bytes done so far now and then."""
        batch: list[Document] = []
        size, before = 0, self.documents
        self.blank.append(0)
        for document in source.everything():
            if document.blank:
                self.blank[-1] += 1
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
        if self.documents == before:
            next(source.documents())  # which says that there is nothing

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
        """What each side lacks; blank documents are of the side that their source is read for."""
        empty = {"train": self.blank[0], "validation": sum(self.blank[1:])}
        found = {side: LeftOut(number) for side, number in empty.items()}
        sides = ["validation" if flag else "train" for flag in flags]
        for side, trained in zip(sides, self.trained, strict=True):
            found[side].empty += examples[side] and not trained
        for number, encoded in self.shortened.items():
            found[sides[number]].shorten(encoded)
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
