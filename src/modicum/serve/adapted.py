"""The model of a run with its adapter, whatever it was trained for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modicum.adapters import AttachedAdapter, base_folder_of, load
from modicum.core.errors import InputError
from modicum.core.files import read_json
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.run_folders import RECORD, no_run
from modicum.core.weight_digests import BASE_WEIGHTS
from modicum.data.pair_tokenizer import PairTokenizer
from modicum.models.huggingface import CONFIG, fill_from, resolve
from modicum.models.transformers.classes import begin_heads, classifier_header, stored_classes
from modicum.models.transformers.loading import DTYPES
from modicum.models.transformers.model import TransformersClassifier, build
from modicum.recipe import Recipe
from modicum.recipe_yaml import load as load_recipe
from modicum.serve.conversation import check_base, check_plugins, load_run, trust_base
from modicum.tasks import task_of
from modicum.tasks.text_class_checks import classifier_shape, formed_classifier
from modicum.tasks.text_classes import TextClasses, TextClassTask


def load_adapted(
    run: str | Path, *, trust_remote_code: bool = False
) -> tuple[Any, AttachedAdapter]:
    """The base model of a run, in evaluation mode, and the run's adapter on it.

    Of a classifier the trained head is in the model.

    Args:
        trust_remote_code: as `load_run` takes it.

    Raises:
        InputError: the run has no adapter, its base is gone or has changed, or a plugin makes its
            task or the forms of its weights.
    """
    folder = Path(run)
    if not any((folder / name).exists() for name in ("adapter", "model", RECORD, CONFIG)):
        raise no_run(folder)
    if not (folder / "adapter").is_dir() and (folder / "model").is_dir():
        problem = f"this run has no adapter; its model is in {folder / 'model'}"
        raise InputError(problem, file=folder)
    file = folder / "recipe.yaml"
    if (folder / "adapter").is_dir() and file.is_file():
        recipe = load_recipe(file)
        check_plugins(recipe, file, trusted=trust_remote_code)
        if isinstance(task := task_of(recipe), TextClassTask):
            return _classifier(folder, recipe, task, trust_remote_code)
    conversation = load_run(folder, trust_remote_code=trust_remote_code)
    if conversation.adapter is None:
        raise InputError("this is a model without an adapter", file=folder)
    return conversation.model, conversation.adapter


def _classifier(
    folder: Path, recipe: Recipe, task: TextClassTask, trusted: bool
) -> tuple[Any, AttachedAdapter]:
    """A classifier, without a look at the data that it was trained on."""
    adapter = folder / "adapter"
    base = base_folder_of(adapter)
    check_base(adapter / BASE_WEIGHTS, base)
    if trusted:
        trust_base(base, folder / "recipe.yaml")
    tokenizer, names = PairTokenizer(folder / "tokenizer"), _classes(folder / "run.json")
    return adapted_classifier(adapter, base, recipe, task.asked, tokenizer, names)


def adapted_classifier(
    adapter: Path,
    base: Path,
    recipe: Recipe,
    asked: TextClasses,
    tokenizer: PairTokenizer,
    names: tuple[str, ...],
) -> tuple[TransformersClassifier, AttachedAdapter]:
    """A base model as a recipe's classifier, with the adapter and the head of a folder.

    Args:
        names: of the classes, in the order of their numbers.

    Raises:
        InputError: the base is no such model, or the adapter has no head for these classes.
    """
    base = resolve(base)
    dense = classifier_shape(asked, base, tokenizer, names)
    header, new = classifier_header(base, dense, keep_head=stored_classes(base) == names)
    with on_meta(DTYPES[header.dtype]):
        model: TransformersClassifier = build(formed_classifier(recipe, dense))
    materialise(model, "cpu")
    fill_from(model, header)
    begin_heads(model, new, recipe.training.seed)
    attached = load(model, adapter)
    return model.eval(), attached


def _classes(file: Path) -> tuple[str, ...]:
    """The names of a run's classes, in the order of their numbers."""
    record = read_json(file)
    data = record.get("data") if isinstance(record, dict) else None
    classes = data.get("classes") if isinstance(data, dict) else None
    if not isinstance(classes, dict):
        raise InputError("does not say which classes the run has", file=file, field="data.classes")
    return tuple(classes)
