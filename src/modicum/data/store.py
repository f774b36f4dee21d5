"""The token cache: all of a source as ids on disk, written once, trusted only when complete.

A store folder holds `tokens.bin` (every document's ids, one after the other, each document ended
by the end-of-text token), of examples `trained.bin` (a byte a token, 1 where it is trained), one
index file a part (`train.bin`, `validation.bin`, `test.bin`: of each document, as int64, its first
place in tokens.bin, its length, how many of its tokens are prompt, and how many are trained), and
`manifest.json` with the digests of these files and of all that they were made from. The folder
appears by one rename, so a death at any moment leaves the old one, or none. Imports no torch.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from modicum.core.files import check_replaced, file_digest, publish_folder, write_json
from modicum.core.progress import CountProgress
from modicum.data.document_writer import DocumentWriter
from modicum.data.parts import PARTS, TEST, TRAIN, VALIDATION, Draw
from modicum.data.sources import Source
from modicum.data.token_store import MANIFEST, TOKENS, TRAINED, Prepared, checked, described
from modicum.data.tokenizer import Tokenizer

_FORMAT = 3
_NOTHING = Draw()
# What a folder of tokens has, also the rows that are packed of them, and what a death leaves.
_OURS = re.compile(
    r"(tokens|trained|train|validation|test)\.bin|manifest\.json|rows-\w+|\.(rows-\w+|\d+)\..+"
)


def prepare(
    source: Source,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    model_vocabulary: int,
    others: Mapping[str, Source] | None = None,
    draw: Draw = _NOTHING,
    longest: int | None = None,
    room: int | None = None,
    progress: CountProgress | None = None,
) -> Prepared:
    """Tokenize all of `source` into `folder`, or find that this was done before.

    Prepared data that `folder` held is replaced. `progress` is called with bytes done and in all.

    Args:
        others: data of their own for `validation` and `test`.
        draw: which documents of `source` are in these parts instead of the training.
        longest: an example of more tokens is refused.
        room: a conversation of more tokens loses its earliest turns.

    Raises:
        InputError: anything that a source says; a token id that the model has no row for; an
            example that is too long; too few documents to hold one out; a full disk; a folder that
            holds other files.
    """
    sources, draw = {TRAIN: source, **(others or {})}, draw.without(others or ())
    made_from = _made_from(sources, draw) | {
        "tokenizer": tokenizer.digest,
        "model_vocabulary": model_vocabulary,
        "longest": longest,
        "room": room,
    }
    if (known := checked(folder, made_from)) is not None:
        return known
    check_replaced(folder, "data", partial(_others, folder))
    total = sum(each.total_bytes for each in sources.values())
    examples = {part: not sources.get(part, source).continuous for part in PARTS}
    with publish_folder(folder) as temporary:
        with ExitStack() as stack:
            tokens = stack.enter_context(open(temporary / TOKENS, "wb"))
            trained = None
            if any(not each.continuous for each in sources.values()):
                trained = stack.enter_context(open(temporary / TRAINED, "wb"))
            writer = DocumentWriter(tokens, trained, tokenizer, model_vocabulary, room)
            flags = bytearray()
            for part, each in sources.items():
                writer.longest = None if each.continuous else longest
                before = writer.documents
                for done in writer.write(each.everything(), part):
                    if progress is not None:
                        progress(min(done, total), total)
                count = writer.documents - before
                if not count:
                    next(each.documents())  # which says that there is nothing
                flags += draw.flags(count) if part == TRAIN else bytes([PARTS.index(part)]) * count
        left_out = writer.left_out(flags, examples)
        held = {part: flag for flag, part in enumerate(PARTS) if part == TRAIN or flag in flags}
        manifest: dict[str, Any] = {
            "made_from": made_from,
            "bytes": writer.bytes,
            "token_bytes": writer.token_bytes,
            "begin": len(tokenizer.begin_ids),
            "sides": {
                part: writer.write_index(temporary / f"{part}.bin", flags, flag)
                | {"examples": examples[part], "left_out": vars(left_out[part])}
                for part, flag in held.items()
            },
        }
        names = [TOKENS, *([TRAINED] if trained else []), *(f"{part}.bin" for part in held)]
        manifest["files"] = {name: file_digest(temporary / name) for name in names}
        write_json(temporary / MANIFEST, manifest)
    if progress is not None:
        progress(total, total)
    return described(folder, manifest, reused=False)


def _others(folder: Path, found: set[str]) -> set[str]:
    """Of the names in a folder, those that are not of prepared data.

    Data of several sources is in folders that have numbers for names, each with its own tokens.
    """
    return {
        name
        for name in found
        if not _OURS.fullmatch(name) and not (name.isdigit() and (folder / name / TOKENS).is_file())
    }


def _made_from(sources: Mapping[str, Source], draw: Draw) -> dict[str, Any]:
    """What decides the documents of each part; without a test, as it was before there were any."""

    def fingerprint(part: str) -> str | None:
        return sources[part].fingerprint() if part in sources else None

    found: dict[str, Any] = {
        "format": _FORMAT,
        "byte_order": sys.byteorder,
        "source": fingerprint(TRAIN),
        "validation_source": fingerprint(VALIDATION),
        "validation_draw": [draw.validation, draw.seed] if draw.validation else None,
    }
    if draw.test or TEST in sources:
        found |= {"test_source": fingerprint(TEST), "test_draw": draw.test}
    return found
