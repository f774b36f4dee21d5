"""A model folder's own tokenizer on texts and pairs of texts, with the special tokens it adds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modicum.core.errors import InputError
from modicum.core.extras import library
from modicum.core.files import json_object

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
_COMPANIONS = (FILE, CONFIG, "special_tokens_map.json", "vocab.txt", "vocab.json", "merges.txt")
_AT_ONCE = 1024


class PairTokenizer:
    """What makes rows of tokens of texts, as the model was trained to read them.

    Raises:
        InputError: the folder has no tokenizer.json, or it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / FILE).is_file():
            raise InputError(
                f"the folder has no {FILE}; in transformers, "
                "`AutoTokenizer.from_pretrained(folder).save_pretrained(folder)` writes it",
                file=folder,
            )
        try:
            tokenizers = library("tokenizers", "hf", "text")
            self.inner: Any = tokenizers.Tokenizer.from_file(str(folder / FILE))
        except (InputError, KeyboardInterrupt, SystemExit):
            raise
        # Whatever the library says of a damaged file; where Rust panics, it is no `Exception`.
        except BaseException as error:
            raise InputError(f"cannot be read: {error}", file=folder / FILE) from None
        self.inner.no_padding()
        self.inner.no_truncation()

    @property
    def files(self) -> list[Path]:
        """What belongs next to exported weights."""
        there = (self.folder / name for name in _COMPANIONS)
        return [file for file in there if file.is_file()]

    @property
    def separates(self) -> bool:
        """Whether it puts something between the two texts of a pair."""
        added = self.inner.num_special_tokens_to_add
        return int(added(True)) > int(added(False))  # what one text gets too is around both

    def pad_id(self, asked: str | None) -> int | None:
        """The number of the token that fills rows: the one asked for, else its own, if it has one.

        Raises:
            InputError: it has no such token.
        """
        name: Any = asked
        if name is None and (self.folder / CONFIG).is_file():
            name = json_object(self.folder / CONFIG).get("pad_token")
            name = name.get("content") if isinstance(name, dict) else name
        found = self.inner.token_to_id(name) if isinstance(name, str) else None
        if asked is not None and found is None:
            added = (t.content for t in self.inner.get_added_tokens_decoder().values())
            known = sorted(added)
            raise InputError(
                "the tokenizer has no such token", value=asked, candidates=known,
                allowed=", ".join(known),
            )  # fmt: skip
        return None if found is None else int(found)

    def encode(
        self, rows: Sequence[tuple[str, ...]], room: int
    ) -> list[tuple[list[int], list[int], bool]]:
        """Of each row its tokens, which text each is of, and whether it was truncated.

        What is longer than `room` loses its end; of a pair, the longer text first.
        """
        self.inner.enable_truncation(room, strategy="longest_first")
        found: list[tuple[list[int], list[int], bool]] = []
        try:
            for start in range(0, len(rows), _AT_ONCE):
                part = rows[start : start + _AT_ONCE]
                given = [row if len(row) > 1 else row[0] for row in part]
                made = self.inner.encode_batch(given)
                found += [(each.ids, each.type_ids, bool(each.overflowing)) for each in made]
        finally:
            self.inner.no_truncation()
        return found
