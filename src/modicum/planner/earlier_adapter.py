"""What `model.adapter` means for a recipe: the adapter that training starts from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from modicum.adapters.base import Adapter
from modicum.adapters.files import read_stored
from modicum.adapters.starting import fields_of
from modicum.core.errors import InputError
from modicum.core.files import JsonObject
from modicum.core.layers.meta import on_meta
from modicum.core.weight_digests import BASE_WEIGHTS, changed_weights, read_digests
from modicum.recipe import Recipe
from modicum.tasks import AnyTask, Inputs

START = "model.adapter"


def started(
    recipe: Recipe, task: AnyTask, inputs: Inputs, known: Iterable[JsonObject]
) -> tuple[Recipe, list[JsonObject]]:
    """The recipe with the fields of the adapter that it starts from, and a row that says so.

    Args:
        known: choices of a run that was begun; it has a copy of the adapter, and the folder may be
            gone.

    Raises:
        InputError: the folder holds no adapter, or one that does not go with recipe or model; or
            there is none, and the method takes frozen tensors from one.
    """
    path, asked = recipe.model.adapter, recipe.method("adapter")
    if any(row["field"] == START for row in known):
        return recipe, []
    if path is None:
        if isinstance(asked, Adapter) and asked.from_file:
            problem = f"{asked.info.name} takes frozen tensors from a file here; give its folder"
            raise InputError(problem, field=START, value=None)
        return recipe, []
    assert isinstance(asked, Adapter)
    try:
        _check_base(Path(path), inputs)
        with on_meta():
            model = task.model(inputs.config)
        stored = read_stored(Path(path), model, plugins=recipe.plugins)
    except InputError as error:
        raise error.located(field=START) from None
    try:
        fields = fields_of(stored, model, asked, recipe.fields("adapter"))
    except InputError as error:
        raise error.within("adapter") if error.field else error.located(field=START) from None
    changed = recipe.changed(adapter={"method": asked.info.name, **fields})
    layers = len(stored.method.targets)
    why = f"training starts from this {asked.info.name}, of {layers} layers"
    return changed, [{"field": START, "value": path, "why": why}]


def _check_base(folder: Path, inputs: Inputs) -> None:
    """Refuse an adapter that says it is of other base weights.

    Raises:
        InputError: it does; or there is no such folder.
    """
    if not folder.is_dir():
        raise InputError("there is no such folder", file=folder)
    digests = folder / BASE_WEIGHTS
    if not digests.is_file() or not inputs.weights:
        return
    if changed := changed_weights(inputs.model_folder, read_digests(digests)):
        raise InputError(
            f"this adapter was trained on other base weights than model.path has "
            f"({', '.join(changed)})",
            file=folder,
        )
