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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from modicum.core.errors import InputError
from modicum.core.files import file_digest, publish_folder, write_json
from modicum.core.progress import CountProgress
from modicum.data.document_writer import DocumentWriter
from modicum.data.sources import Source
from modicum.data.token_store import MANIFEST, TOKENS, TRAINED, Prepared, checked, described
from modicum.data.tokenizer import Tokenizer

_FORMAT = 3


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
            writer = DocumentWriter(tokens, flags, tokenizer, model_vocabulary, room)
            ends = []
            for each in sources:
                writer.longest = None if each.continuous else longest
                before = writer.documents
                for done in writer.write(each.everything()):
                    if progress is not None:
                        progress(min(done, total), total)
                ends.append(writer.documents)
                if writer.documents == before:
                    next(each.documents())  # which says that there is nothing
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
