"""`study.json`: what a folder's study is of, and the settings that were frozen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modicum.comparison.identity import as_json, grown, refuse_other
from modicum.core.errors import InputError
from modicum.core.files import read_json, write_json

STUDY, FORMAT = "study.json", 1
_NEEDED = {"format", "identity", "trials", "seeds", "frozen", "frozen_before"}
_WORDS = "refusal"  # of a side in older files: why it took no part


def is_damaged(file: Path) -> bool:
    """Whether a file that is there, and can be read, holds no JSON object: a disk's fault."""
    try:
        return not isinstance(json.loads(file.read_bytes()), dict)
    except OSError:
        return False
    except (ValueError, RecursionError):
        return True


def refused_at_first(there: Mapping[str, Any]) -> dict[str, str]:
    """Why sides took no part when a study began, by their names.

    Args:
        there: the content of its file.
    """
    sides: Mapping[str, Any] = there["identity"].get("sides") or {}
    older = {name: side[_WORDS] for name, side in sides.items() if _WORDS in side}
    return {**older, **there.get("refused", {})}


class StudyFile:
    """The record of a study in its folder; each write is atomic."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / STUDY

    def begin(
        self,
        identity: Mapping[str, Any],
        lengths: Mapping[str, int],
        refused: Mapping[str, str] | None = None,
    ) -> bool:
        """Begin a study, or take over the one that is there; whether that was damaged.

        A damaged one is begun anew: all that it held follows from the trials next to it, but for
        settings that were frozen before there were more of them.

        Args:
            lengths: of trials and seeds, which may grow.
            refused: why sides take no part, by their names; kept as it was when the study began.

        Raises:
            InputError: what is there is another study, a longer one, or cannot be read.
        """
        there: dict[str, Any] = {"format": FORMAT, "frozen": None, "frozen_before": []}
        first = dict(refused or {})
        damaged = is_damaged(self.path)
        if self.path.exists() and not damaged:
            there = self._read()
            refuse_other(_as_now(there["identity"]), identity, self.path)
            for name, here in lengths.items():
                grown(name, there[name], here, self.path)
            first |= refused_at_first(there)
        write_json(self.path, {**there, "refused": first, "identity": dict(identity), **lengths})
        return damaged

    def freeze(self, settings: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Write down each side's settings; the other ones that were frozen earlier, which stay.

        Raises:
            InputError: the file was removed, or cannot be written.
        """
        there = self._read()
        frozen = {"trials": there["trials"], "settings": as_json(settings)}
        earlier: list[dict[str, Any]] = there["frozen_before"]
        if there["frozen"] is not None and there["frozen"]["settings"] != frozen["settings"]:
            earlier = [*earlier, there["frozen"]]
        write_json(self.path, there | {"frozen": frozen, "frozen_before": earlier})
        return earlier

    def _read(self) -> dict[str, Any]:
        found = read_json(self.path)
        if not isinstance(found, dict) or not set(found) >= _NEEDED or found["format"] != FORMAT:
            raise InputError(
                "this is no comparison's record; remove it, and the trials next to it are kept",
                file=self.path,
            )
        return found


def _as_now(identity: Mapping[str, Any]) -> dict[str, Any]:
    """What an older file says that a study is of, as it is written now."""
    sides = {}
    for name, side in (identity.get("sides") or {}).items():
        own = {key: value for key, value in side.items() if key != _WORDS}
        sides[name] = {**own, "refused": True} if _WORDS in side else own
    return {**identity, "sides": sides}
