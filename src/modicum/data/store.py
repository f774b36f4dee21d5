"""The token cache: all of a source as ids on disk, written once, trusted only when complete.

A store folder holds `tokens.bin` (every document's ids, one after the other, each document ended
by the end-of-text token), one index file a side (`train.bin`, `validation.bin`: int64 triples of a
document's first place in tokens.bin, its length, and how many of its tokens are prompt), and
`manifest.json` with the digests of these files and of all that they were made from. The folder
appears by one rename, so a death at any moment leaves the old one, or none. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from modicum.core.errors import InputError
from modicum.core.files import file_digest, publish_folder, regular, write_json
from modicum.core.progress import CountProgress
from modicum.data.readers import Document
from modicum.data.sources import Source
from modicum.data.tokenizer import Tokenizer

_FORMAT = 1
_TOKENS, _MANIFEST = "tokens.bin", "manifest.json"
# So much text is tokenized at a time, and at most so many documents: bounds the scratch memory.
_BATCH_BYTES, _BATCH_DOCUMENTS = 1 << 20, 1024


@dataclass(frozen=True)
class TokenStore:
    """One side (training or validation) of a store folder.

    Args:
        folder: where the files are.
        side: "train" or "validation".
        documents, tokens: how many this side has, end tokens counted.
        token_bytes: 2 or 4, the width of an id in tokens.bin.
    """

    folder: Path
    side: str
    documents: int
    tokens: int
    token_bytes: int

    @property
    def tokens_file(self) -> Path:
        """Unsigned ids of `token_bytes` each, of both sides."""
        return self.folder / _TOKENS

    @property
    def index_file(self) -> Path:
        """int64 [documents, 3]: first place in the tokens file, length, prompt's length."""
        return self.folder / f"{self.side}.bin"


@dataclass(frozen=True)
class Prepared:
    """What `prepare` made: both sides, the totals over them, and whether the cache served."""

    train: TokenStore
    validation: TokenStore | None
    documents: int
    tokens: int
    bytes: int
    reused: bool


def prepare(
    source: Source,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    model_vocabulary: int,
    validation_source: Source | None = None,
    validation_fraction: float = 0.0,
    seed: int = 0,
    progress: CountProgress | None = None,
) -> Prepared:
    """Tokenize all of `source` into `folder`, or find that this was done before.

    Whatever `folder` held is replaced. Validation documents are those of `validation_source`, or
    without one a fraction of the documents, each drawn by (seed, its number) alone; at least one
    document falls on each side. `progress` is called with bytes done and in all.

    Raises:
        InputError: anything that the source says; a token id that the model has no row for; too
            few documents to hold one out; a full disk.
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
    }
    if (known := _open(folder, made_from)) is not None:
        return known
    sources = [source, *([validation_source] if validation_source else [])]
    total = sum(each.total_bytes for each in sources)
    with publish_folder(folder) as temporary:
        with open(temporary / _TOKENS, "wb") as handle:
            writer = _Writer(handle, tokenizer, model_vocabulary)
            ends = []
            for each in sources:
                for done in writer.write(each.documents()):
                    if progress is not None:
                        progress(min(done, total), total)
                ends.append(writer.documents)
        if drawn:
            validation = _draw(writer.documents, validation_fraction, seed)
        else:
            validation = bytearray(ends[0]) + bytearray(b"\1") * (writer.documents - ends[0])
        sides = {"train": 0, **({"validation": 1} if any(validation) else {})}
        manifest: dict[str, Any] = {
            "made_from": made_from,
            "bytes": writer.bytes,
            "token_bytes": writer.token_bytes,
            "sides": {
                side: writer.write_index(temporary / f"{side}.bin", validation, flag)
                for side, flag in sides.items()
            },
        }
        names = [_TOKENS, *(f"{side}.bin" for side in sides)]
        manifest["files"] = {name: file_digest(temporary / name) for name in names}
        write_json(temporary / _MANIFEST, manifest)
    if progress is not None:
        progress(total, total)
    return _prepared(folder, manifest, reused=False)


def _open(folder: Path, made_from: dict[str, Any]) -> Prepared | None:
    """The store in `folder` if it is complete and was made from just this, else None."""
    try:
        manifest = json.loads(regular(folder / _MANIFEST).read_bytes())
        if manifest["made_from"] != made_from:
            return None
        for name, digest in manifest["files"].items():
            if file_digest(folder / name) != digest:
                return None
        return _prepared(folder, manifest, reused=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # absent, truncated or overwritten: to be made again


def _prepared(folder: Path, manifest: dict[str, Any], reused: bool) -> Prepared:
    width = manifest["token_bytes"]
    sides = {
        name: TokenStore(folder, name, side["documents"], side["tokens"], width)
        for name, side in manifest["sides"].items()
    }
    return Prepared(
        sides["train"],
        sides.get("validation"),
        documents=sum(side.documents for side in sides.values()),
        tokens=sum(side.tokens for side in sides.values()),
        bytes=manifest["bytes"],
        reused=reused,
    )


def _draw(documents: int, fraction: float, seed: int) -> bytearray:
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
    """Appends documents' ids to a file and remembers where each begins, in 12 bytes a document."""

    handle: BinaryIO
    tokenizer: Tokenizer
    model_vocabulary: int
    bytes: int = 0
    lengths: array[int] = field(default_factory=lambda: array("q"))
    prompts: array[int] = field(default_factory=lambda: array("I"))

    @property
    def documents(self) -> int:
        return len(self.lengths)

    @property
    def token_bytes(self) -> int:
        return 2 if self.model_vocabulary <= 1 << 16 else 4

    def write(self, documents: Iterator[Document]) -> Iterator[int]:
        """Tokenize and append all `documents`; gives the bytes done so far now and then."""
        batch: list[Document] = []
        size = 0
        for document in documents:
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
        encode, begin = self.tokenizer.encode_batch, self.tokenizer.begin_ids
        texts = encode([document.text for document in batch])
        prompts: list[list[int]] = [[]] * len(batch)
        if any(document.prompt for document in batch):
            prompts = encode([document.prompt or "" for document in batch])
        for document, prompt, text in zip(batch, prompts, texts, strict=True):
            ids = [*begin, *prompt, *text, self.tokenizer.eos_id]
            if max(ids) >= self.model_vocabulary:
                raise self._beyond(document, ids)
            array("H" if self.token_bytes == 2 else "I", ids).tofile(self.handle)
            self.lengths.append(len(ids))
            self.prompts.append(len(begin) + len(prompt))
            self.bytes += document.size

    def _beyond(self, document: Document, ids: list[int]) -> InputError:
        worst = next(token for token in ids if token >= self.model_vocabulary)
        return InputError(
            f"the tokenizer gives token {worst} ({self.tokenizer.token(worst)!r}) in "
            f"{document.origin}, but the model's vocabulary ends at {self.model_vocabulary - 1}; "
            "use the tokenizer that belongs to the model, or a larger vocabulary",
            value=worst,
            allowed=f"token ids below {self.model_vocabulary}",
        )

    def write_index(self, path: Path, flags: bytearray, flag: int) -> dict[str, int]:
        """Write the index of the documents whose flag is `flag`; its documents and tokens."""
        index, first, documents, tokens = array("q"), 0, 0, 0
        for mine, length, prompt in zip(flags, self.lengths, self.prompts, strict=True):
            if mine == flag:
                index.extend((first, length, prompt))
                documents, tokens = documents + 1, tokens + length
            first += length
        path.write_bytes(index.tobytes())
        return {"documents": documents, "tokens": tokens}
