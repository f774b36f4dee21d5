"""Data that a trial has prepared, for the trials after it that read the same.

A run looks at what lies in its folder, and takes it only where its digests say that it was made
from the same files in the same way; so what is laid there is an offer, never a decision.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

from modicum.core.files import remove
from modicum.recipe import Recipe
from modicum.trainer.folder import DATA, OFFERED


class KeptData:
    """The prepared data of a comparison's trials, one folder for each way to prepare it.

    Args:
        folder: of the comparison.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / DATA

    def offer(self, recipe: Recipe, run: Path) -> None:
        """Lay what there is into the folder of a run that has none; as links where that works.

        A disk that does not take it is the run's own to complain of.
        """
        kept, target = self._of(recipe), run / OFFERED
        if not kept.is_dir() or target.exists() or (run / DATA).exists():
            return
        with suppress(OSError, shutil.Error):
            shutil.copytree(kept, target, copy_function=_linked)
            return
        remove(target)

    def keep(self, recipe: Recipe, run: Path) -> None:
        """Take the data of a run that has ended, where there is none yet."""
        kept = self._of(recipe)
        with suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            (run / DATA).rename(kept)  # which an earlier one stops, as it is not empty

    def remove(self) -> None:
        """Remove all of it: no trial is left."""
        remove(self.folder)

    def _of(self, recipe: Recipe) -> Path:
        return self.folder / way_to_prepare(recipe)


def way_to_prepare(recipe: Recipe) -> str:
    """A name for how a recipe's data is prepared: recipes that prepare it alike have the same."""
    plain = recipe.plain()
    asked = [plain.get("data"), plain.get("task"), plain.get("model"), recipe.training.seed]
    text = json.dumps(asked, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _linked(source: str, target: str) -> None:
    """A link to a file, which nobody writes in place; a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
