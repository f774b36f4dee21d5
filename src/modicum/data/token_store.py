"""A folder of tokens as its readers see it: where the files are, and what its manifest says.

`store.prepare` writes it and says what is in it. Imports no torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modicum.core.errors import InputError
from modicum.core.files import file_digest, regular
from modicum.data.encoding import LeftOut
from modicum.data.parts import PARTS, TEST, TRAIN, VALIDATION

TOKENS, TRAINED, MANIFEST = "tokens.bin", "trained.bin", "manifest.json"


@dataclass(frozen=True)
class TokenStore:
    """One part of a store folder: training, validation or test.

    Args:
        folder: where the files are.
        side: the part's name, as `PARTS` has it.
        documents, tokens: how many this part has, end tokens counted.
        token_bytes: 2 or 4, the width of an id in tokens.bin.
        examples: whether each document is an example, which stays in one piece, not continuous
            text.
        begin: how many tokens the tokenizer puts before every document.
        left_out: what is not among the tokens.
    """

    folder: Path
    side: str
    documents: int
    tokens: int
    token_bytes: int
    examples: bool = False
    begin: int = 0
    left_out: LeftOut = field(default_factory=LeftOut)

    @property
    def tokens_file(self) -> Path:
        """Unsigned ids of `token_bytes` each, of all parts."""
        return self.folder / TOKENS

    @property
    def trained_file(self) -> Path:
        """A byte for each token of all parts, 1 where it is trained; where there are examples."""
        return self.folder / TRAINED

    @property
    def index_file(self) -> Path:
        """int64 [documents, 4]: first place in the tokens file, length, prompt, trained."""
        return self.folder / f"{self.side}.bin"


@dataclass(frozen=True)
class Prepared:
    """What `prepare` made: the parts, the totals over them, and whether the cache served."""

    train: TokenStore
    validation: TokenStore | None
    test: TokenStore | None
    documents: int
    tokens: int
    bytes: int
    reused: bool

    @property
    def parts(self) -> dict[str, TokenStore]:
        """The parts that there are, by name, in the order of `PARTS`."""
        found = {part: getattr(self, part) for part in PARTS}
        return {part: store for part, store in found.items() if store is not None}


def checked(folder: Path, made_from: dict[str, Any]) -> Prepared | None:
    """The store in `folder` if it is complete and was made from just this, else None."""
    try:
        manifest = json.loads(regular(folder / MANIFEST).read_bytes())
        if manifest["made_from"] != made_from:
            return None
        for name, digest in manifest["files"].items():
            if file_digest(folder / name) != digest:
                return None
        return described(folder, manifest, reused=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # absent, truncated or overwritten: to be made again


def described(folder: Path, manifest: dict[str, Any], reused: bool) -> Prepared:
    """What a manifest says of the files next to it."""
    width, begin = manifest["token_bytes"], manifest["begin"]
    sides = {
        name: TokenStore(
            folder,
            name,
            side["documents"],
            side["tokens"],
            width,
            side["examples"],
            begin,
            LeftOut(**side["left_out"]),
        )
        for name, side in manifest["sides"].items()
    }
    return Prepared(
        sides[TRAIN],
        sides.get(VALIDATION),
        sides.get(TEST),
        documents=sum(side.documents for side in sides.values()),
        tokens=sum(side.tokens for side in sides.values()),
        bytes=manifest["bytes"],
        reused=reused,
    )


def written(folder: Path, digest: str) -> Prepared:
    """The store that another process has just written or checked; its files are not read again.

    Args:
        digest: of its manifest, as that process has it.

    Raises:
        InputError: there is another one, or none.
    """
    path = folder / MANIFEST
    try:
        if file_digest(path) != digest:
            raise InputError(
                "is not the one that rank 0 wrote; all ranks need one folder", file=path
            )
        return described(folder, json.loads(path.read_bytes()), reused=True)
    except OSError as error:
        raise InputError(
            f"is not seen by this rank ({error.strerror}); all ranks need one folder", file=path
        ) from error
