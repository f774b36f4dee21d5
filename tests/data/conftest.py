"""What the tests of the data room share: a small tokenizer and stores written by hand."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from modicum.data import Tokenizer, TokenStore

LINES = [f"def area_{n}(width, height):\n    return width * height + {n}\n" for n in range(40)]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(iter(LINES), vocabulary_size=280)


@pytest.fixture(scope="session")
def write_store() -> Callable[..., TokenStore]:
    """Documents are (ids, length of the prompt); they lie in the file in another order."""

    def write(
        folder: Path,
        documents: Sequence[tuple[list[int], int]],
        token_bytes: int = 2,
        *,
        examples: bool = False,
        begin: int = 0,
    ) -> TokenStore:
        tokens, places, flags = array("H" if token_bytes == 2 else "I"), {}, b""
        for number, (ids, prompt) in reversed(list(enumerate(documents))):
            places[number] = len(tokens)
            tokens.extend(ids)
            free = max(prompt, 1)
            flags += bytes(free) + b"\1" * (len(ids) - free)
        index = array("q")
        for number, (ids, prompt) in enumerate(documents):
            index.extend((places[number], len(ids), prompt, len(ids) - max(prompt, 1)))
        store = TokenStore(
            folder, "train", len(documents), len(tokens), token_bytes, examples, begin
        )
        if examples:
            store.trained_file.write_bytes(flags)
        store.tokens_file.write_bytes(tokens.tobytes())
        store.index_file.write_bytes(index.tobytes())
        return store

    return write
