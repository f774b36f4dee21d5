"""Documents as tensors: the mapped files of a store, or tokens that are in memory alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from modicum.data.token_store import TokenStore


@dataclass(frozen=True)
class TokenArrays:
    """The tokens of documents, and where each of them is.

    Args:
        tokens: ids, int16 (read as unsigned) or int32: [tokens].
        index: of each document its first place there, its length, its prompt's length and how many
            of its tokens are trained: int64 [4, documents].
        flags: 1 where a token is trained: uint8 [tokens]; None of continuous text.
        begin: how many tokens the tokenizer puts before every document.
    """

    tokens: Tensor
    index: Tensor
    flags: Tensor | None = None
    begin: int = 0

    @classmethod
    def of(cls, store: TokenStore) -> TokenArrays:
        """One side of a store; its files are mapped, and not read."""
        flags = mapped(store.trained_file, 1) if store.examples else None
        tokens = mapped(store.tokens_file, store.token_bytes)
        return cls(tokens, indexed(store), flags, store.begin)

    @property
    def documents(self) -> int:
        """How many there are."""
        return self.index.shape[1]

    def ids(self, places: Tensor) -> Tensor:
        """The token ids at places of `tokens`, int64."""
        found = self.tokens[places]
        wide = found.long()
        if found.dtype == torch.int16:
            wide &= 0xFFFF  # torch has few operations on unsigned integers, so the file is int16
        return wide


def mapped(path: Path, width: int) -> Tensor:
    """The integers of a file, [bytes / width], signed, mapped and not read."""
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    size = path.stat().st_size // width
    return torch.from_file(str(path), shared=False, size=size, dtype=dtype)


def indexed(store: TokenStore) -> Tensor:
    """Of each document its place, length, prompt's length and trained tokens: int64 [4, n]."""
    return mapped(store.index_file, 8).view(-1, 4).t()
