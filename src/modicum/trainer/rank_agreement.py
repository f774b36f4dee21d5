"""Whether all ranks are about to do the same run: recipe, code, versions, base model, folder."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from modicum import __version__
from modicum.core.errors import InputError
from modicum.core.files import disk_errors
from modicum.core.machine import versions
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.roll_call import RollCall
from modicum.core.weight_digests import weight_digests
from modicum.recipe import Recipe, differences

# For how long a new file is waited for, which disks in a network may show late.
SEEN_SECONDS = 10.0
_POLL_SECONDS = 0.05


def same_setup(recipe: Recipe, ranks: Ranks, *, just_met: bool = False) -> None:
    """Make sure that every rank has rank 0's recipe, code and versions.

    Args:
        just_met: whether ranks have just met, and nobody watches them yet: one of which nothing is
            heard is then named after seconds, which no collective does.

    Raises:
        InputError: one has not; with the difference, on every rank.
        PeerLost: they have just met, and one does not come.
    """
    if not just_met or ranks.alone:
        ranks.same("setup", _setup(recipe), _explain)
        return
    # Within the roll call: a rank that reads its files from a slow disk shows that it lives.
    with RollCall("their setup", ranks.rank, ranks.size) as call:
        ranks.same("setup", _setup(recipe), _explain, partial(call.gather, "setup"))


def _setup(recipe: Recipe) -> dict[str, Any]:
    return {"recipe": recipe.plain(), "modicum": __version__, "code": code(), **versions()}


def same_model(folder: Path | None, ranks: Ranks) -> None:
    """Make sure that every rank reads rank 0's base model.

    Raises:
        InputError: one has not; with the files that differ, on every rank.
    """
    ranks.same("base model", weight_digests(folder), _explain)


def same_folder(folder: Path, ranks: Ranks) -> None:
    """Make sure that every rank sees the run folder that rank 0 has.

    Args:
        folder: which is there for rank 0, and locked.

    Raises:
        InputError: one does not; with its name, on every rank.
    """
    if ranks.alone:
        return
    # One that a killed process leaves goes with whatever is half written when the next begins.
    own = folder / f".{secrets.token_hex(8)}.part"
    if ranks.first:
        with disk_errors(folder):
            own.touch()
    try:
        seen = _appears(folder / ranks.broadcast(own.name))
        blind = [name for name in ranks.gather(None if seen else ranks.name) if name is not None]
    finally:
        if ranks.first:
            own.unlink(missing_ok=True)
    if blind:
        raise InputError(
            f"{blind[0]} does not see this folder of rank 0; give --out one that all ranks see, on "
            "a disk that their hosts share",
            file=folder,
        )


def _appears(file: Path) -> bool:
    """Whether a file is here, at once or before `SEEN_SECONDS` are over."""
    end = time.monotonic() + SEEN_SECONDS
    while not os.path.exists(file):
        if time.monotonic() > end:
            return False
        for folder in (file.parent.parent, file.parent):
            # Once a folder is opened, a host asks the disk in the network anew what is in it.
            with suppress(OSError):
                os.close(os.open(folder, os.O_RDONLY))
        time.sleep(_POLL_SECONDS)
    return True


@cache
def code() -> str:
    """A digest of modicum's own source files."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _explain(first: dict[str, Any], other: dict[str, Any]) -> str:
    return "; ".join(differences(first, other))
