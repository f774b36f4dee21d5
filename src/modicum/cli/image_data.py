"""`modicum data` of a user's own images: which there are, and how many each class has."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from modicum.cli.class_tables import class_table
from modicum.cli.tables import table
from modicum.core.ranks.ranks import Ranks
from modicum.recipe import Recipe
from modicum.tasks.image_origins import OwnImages
from modicum.tasks.images import ImageTask


def show_images(
    recipe: Recipe, task: ImageTask, origin: OwnImages, *, rows: int | None, as_json: bool
) -> None:
    """Read every image in a temporary folder, and print how many each class has, or all files.

    Of parts that are held out, also how many of their images are trained on too.

    Args:
        rows: of the files, how many are printed with `as_json`; None: all.

    Raises:
        InputError: an image cannot be read, with its name.
    """
    inputs = task.look(recipe)
    files = origin.files(recipe.training.seed)
    with tempfile.TemporaryDirectory(prefix="modicum-data-") as folder:
        data = task.prepare(recipe, inputs, Path(folder), lambda *_: None, Ranks())
        known = set(task.digests(data.train))
        odd: list[tuple[str, str, str]] = []
        for name, held in (("validation", data.validation), ("test", data.test)):
            if held is not None:
                twice = sum(digest in known for digest in task.digests(held))
                odd.append((f"overlap of the {name}", f"{twice:,}", "images that train too"))
    every = [(part, file) for part, own in files.parts.items() for file in own]
    if as_json:
        for number, (part, file) in enumerate(every[:rows]):
            row = {"row": number, "side": part, "file": file.name, "label": file.label}
            print(json.dumps(row))
        return
    class_table(files.counts(), files.names, inputs.described)
    if odd:
        table(("Data", "Count", ""), odd)
