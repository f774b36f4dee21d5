"""What a recipe for classes of texts asks of model and tokenizer, checked and put into words."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from modicum.core.errors import InputError
from modicum.data.pair_tokenizer import PairTokenizer
from modicum.models.transformers.classes import classifier_config
from modicum.models.transformers.config import TransformersConfig
from modicum.recipe import Recipe
from modicum.tasks.text import formed
from modicum.tasks.text_class_data import LabelledTexts

if TYPE_CHECKING:
    from modicum.tasks.text_classes import TextClasses


def classifier_shape(
    asked: TextClasses, folder: Path, tokenizer: PairTokenizer, names: Sequence[str]
) -> TransformersConfig:
    """The shape of a folder's model as a classifier of these classes.

    Raises:
        InputError: model or tokenizer do not go with what is asked, with the recipe's field.
    """
    if len(asked.text_columns) > 1 and not tokenizer.separates:
        raise InputError(
            "this model's tokenizer puts nothing between the two texts of a pair; write them "
            "into one column",
            field="task.text_columns",
            value=list(asked.text_columns),
        )
    try:
        own = tokenizer.pad_id(asked.pad_token)
    except InputError as error:
        raise error.located(field="task.pad_token") from None
    try:
        return classifier_config(folder, names, own, known_first=asked.pad_token is None)
    except InputError as error:
        if error.field == "pad_token_id":
            raise InputError(error.problem, field="task.pad_token") from None
        raise error.located(field="model.path") from None


def formed_classifier(recipe: Recipe, dense: TransformersConfig) -> TransformersConfig:
    """The shape of a classifier with the linear forms that a recipe gives it."""
    found = formed(recipe, dense, ["linear"])
    assert isinstance(found, TransformersConfig)
    return found


def check_asked(recipe: Recipe) -> None:
    """Refuse what is not known to be right with a new head.

    Raises:
        InputError: such a field is set.
    """
    adapter = recipe.method("adapter")
    if adapter is not None and adapter.info.name != "lora":
        raise InputError(
            "the classifier's head is trained next to the adapter and kept in its file, which "
            "PEFT's format alone holds; of adapters, LoRA goes with it",
            field="adapter.method",
            value=adapter.info.name,
            allowed="lora",
        )
    if recipe.compress is not None:
        raise InputError(
            "compressing a classifier of texts was not tried; leave it out",
            field="compress.method",
            value=recipe.compress["method"],
        )


def own_tokenizer(recipe: Recipe, folder: Path) -> PairTokenizer:
    """The tokenizer that a recipe names, else the model's.

    Raises:
        InputError: there is none, with the recipe's field.
    """
    asked = recipe.data.tokenizer
    try:
        return PairTokenizer(folder if asked is None else Path(asked))
    except InputError as error:
        raise error.located(field="data.tokenizer" if asked else "model.path") from None


def head_words(known: tuple[str, ...] | None, texts: LabelledTexts, new: Collection[str]) -> str:
    """What becomes of the folder's head, for people."""
    modules = ", ".join(dict.fromkeys(name.rpartition(".")[0] for name in new))
    if not modules:
        return ""
    why = "" if known in (None, texts.names) else ", as the folder's is for other classes"
    return f"; new: {modules}{why}"
