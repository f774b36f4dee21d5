"""Whether all ranks are about to do the same run: recipe, code, versions, base model."""

from __future__ import annotations

import hashlib
from functools import cache, partial
from pathlib import Path
from typing import Any

from modicum import __version__
from modicum.core.machine import versions
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.roll_call import RollCall
from modicum.core.weight_digests import weight_digests
from modicum.recipe import Recipe, differences


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
