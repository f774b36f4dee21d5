"""A stand-in for the hub: a repository that is downloaded from a folder of this machine."""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

COMMIT, LATER = 40 * "a", 40 * "b"


@dataclass
class StandIn:
    """What `snapshot_download` asks of the hub: a folder's files, into a cache like its own.

    Args:
        folder: the repository, as it is at `commit`.
        cache: where snapshots are.
        asked: the patterns of each download.
        error: what is raised instead.
    """

    folder: Path
    cache: Path
    commit: str = COMMIT
    asked: list[Sequence[str]] = field(default_factory=list)
    error: Exception | None = None

    def download(
        self, name: str, *, revision: str | None, allow_patterns: Sequence[str], **_: Any
    ) -> str:
        """As `huggingface_hub.snapshot_download`."""
        self.asked.append(allow_patterns)
        if self.error is not None:
            raise self.error
        commit = revision if revision in (COMMIT, LATER) else self.commit
        target = self.cache / f"models--{name.replace('/', '--')}" / "snapshots" / str(commit)
        for file in self.folder.rglob("*"):
            place = target / file.relative_to(self.folder)
            path = place.relative_to(target).as_posix()
            wanted = any(fnmatch.fnmatch(path, each) for each in allow_patterns)
            if wanted and file.is_file() and not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, place)
        return str(target)

    def downloaded(self, what: str) -> bool:
        """Whether a file of this name was asked for."""
        return any(fnmatch.fnmatch(what, each) for patterns in self.asked for each in patterns)


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path, cache: Path) -> StandIn:
    """Replace the hub by a folder, which is any model that is asked for."""
    made = StandIn(folder, cache)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.download)
    return made
