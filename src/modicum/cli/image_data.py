"""`modicum data` of a user's own images: which there are, and how many each class has."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from modicum.cli.tables import table
from modicum.core.ranks.ranks import Ranks
from modicum.data.image_files import TRAIN, VALIDATION
from modicum.recipe import Recipe
from modicum.tasks.image_origins import OwnImages
from modicum.tasks.images import ImageTask

_SIDES = (TRAIN, VALIDATION)


def show_images(
    recipe: Recipe, task: ImageTask, origin: OwnImages, *, rows: int | None, as_json: bool
) -> None:
    """Read every image in a temporary folder, and print how many each class has, or all files.

    Args:
        rows: of the files, how many are printed with `as_json`; None: all.

    Raises:
        InputError: an image cannot be read, with its name.
    """
    inputs = task.look(recipe)
    files = origin.files(recipe.training.seed)
    with tempfile.TemporaryDirectory(prefix="modicum-data-") as folder:
        task.prepare(recipe, inputs, Path(folder), lambda *_: None, Ranks())
    every = [(side, file) for side in _SIDES for file in getattr(files, side)]
    if as_json:
        for number, (side, file) in enumerate(every[:rows]):
            row = {"row": number, "side": side, "file": file.name, "label": file.label}
            print(json.dumps(row))
        return
    counts = files.counts()
    lines = [(name, *(f"{counts[side][name]:,}" for side in _SIDES)) for name in files.names]
    lines.append(("all", *(f"{len(getattr(files, side)):,}" for side in _SIDES)))
    table(("Class", "Training", "Validation"), lines, title=inputs.described)
