"""Where a recipe's trained model comes from: a folder, a run, or the hub."""

from __future__ import annotations

from pathlib import Path

from modicum.core.errors import InputError
from modicum.core.files import JsonObject
from modicum.core.ranks.ranks import Ranks
from modicum.models.hub_models import PREFIX, HubModel, hub_folder
from modicum.models.huggingface import resolve
from modicum.models.transformers.trusted import trust
from modicum.recipe import Recipe

PATH = "model.path"


def model_folder(recipe: Recipe) -> Path:
    """The folder of `model.path`; its code has run where the recipe says so.

    Raises:
        InputError: there is none, or the hub does not give it; its code cannot be run.
    """
    path = recipe.model.path or ""
    trusted = recipe.model.trust_remote_code
    try:
        folder = hub_folder(path, code=trusted) if path.startswith(PREFIX) else resolve(path)
        if trusted:
            trust(folder)
    except InputError as error:
        raise error.located(field=PATH) from None
    return folder


def pinned(recipe: Recipe, ranks: Ranks) -> tuple[Recipe, list[JsonObject]]:
    """The recipe with the commit of a model of the hub, which the run stays with, and a row.

    Rank 0 asks the hub, and all have what it was given.

    Raises:
        InputError: as `model_folder`.
    """
    path = recipe.model.path or ""
    if not path.startswith(PREFIX):
        return recipe, []
    commit = ranks.first_alone(lambda: model_folder(recipe).name)
    asked = HubModel.parsed(path)
    if asked.pinned:
        return recipe, []
    found = asked.at(ranks.broadcast(commit)).spelling
    why = f"the commit of {asked.revision or 'main'} now; the run stays with it"
    return recipe.changed(model__path=found), [{"field": PATH, "value": found, "why": why}]
