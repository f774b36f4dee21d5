"""A recipe for classes of texts: columns, lengths and rates of a classifier."""

from __future__ import annotations

import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from modicum.core.errors import InputError
from modicum.core.files import json_object
from modicum.data.survey import SURVEYED_BYTES
from modicum.models.huggingface import CONFIG, read_config
from modicum.models.transformers.classes import longest
from modicum.models.transformers.kinds import is_encoder
from modicum.planner.starting import rules
from modicum.planner.starting.common import Start, model_facts, planned, set_pace
from modicum.planner.starting.draft import Draft, OpenQuestion
from modicum.planner.starting.label_columns import look_at_labels
from modicum.planner.starting.lengths import Lengths, row_length
from modicum.planner.starting.method import choose_method
from modicum.planner.starting.stored import stored_dtype
from modicum.tasks import task_of
from modicum.tasks.model_origins import model_folder
from modicum.tasks.text_class_data import check_data
from modicum.tasks.text_classes import TextClassInputs

CLASSES = "text_classes"
_TASK, _PAD, _TRUST = "task.method", "task.pad_token", "model.trust_remote_code"


def set_task(draft: Draft, model: str | None) -> bool:
    """Set the task where a recipe is to tell texts apart: it is asked for, or is all a model can.

    Raises:
        InputError: the model's folder is not there.
    """
    if draft.asked.get(_TASK) == CLASSES:
        draft.set(_TASK, CLASSES, "")
        return True
    if _TASK in draft.asked or model is None:
        return False
    if _of_an_encoder(draft, model):
        draft.set(_TASK, CLASSES, "the model is an encoder, which writes no text")
        return True
    return False


def start_classes(draft: Draft, method: str | None) -> Start:
    """Make a recipe of a draft that names the model, the data and the budget.

    Raises:
        InputError: model or data are missing, broken or not supported, or do not go together.
    """
    check_data(draft.recipe())
    columns = look_at_labels(draft)
    inputs = _looked_at(draft)
    assert inputs.model_folder is not None
    dtype = stored_dtype(inputs.model_folder)
    facts = model_facts(draft, inputs, dtype)
    counts = inputs.texts.counts()
    sizes = Counter(counts["classes"].values())
    guessed = "task.label_column" not in draft.asked
    if guessed and sum(sizes.values()) > 10 and 2 * sizes[1] > sum(sizes.values()):
        raise InputError(
            "most of its values are those of one text alone, so these seem to be no classes; "
            "`--set task.label_column=NAME` takes a column whatever is in it",
            field="task.label_column",
            value=columns["label_column"],
        )
    lengths = _lengths(inputs, counts["rows"])
    _describe_data(draft, lengths, len(counts["classes"]))
    draft.set("data.sequence_length", *row_length(lengths, longest(inputs.config), "texts"))
    part = 0.0
    if not draft.has("data.validation_path"):
        of_each = tuple(counts["classes"].values())
        part = float(draft.set("data.validation_fraction", *rules.held_out_by_class(of_each)))
    updates = _set_updates(draft, round(counts["rows"] * (1 - part)))
    adapter = choose_method(draft, inputs, method, dtype)
    rate = rules.class_rate(inputs.config.parameter_count(), adapter)
    draft.set("training.learning_rate", *rate)
    set_pace(draft, updates, rules.warmup_steps(updates, False, head=True))
    draft.take_asked()
    made, refused = planned(draft)
    found = {
        **columns, "described": inputs.texts.title, "continuous": False, "unit": "text",
        "documents": lengths.documents, "exact": lengths.exact, "median": lengths.quantile(0.5),
        "longest": lengths.tokens[-1], **counts,
    }  # fmt: skip
    return Start(draft, draft.recipe(), facts, found, made, refused)


def _of_an_encoder(draft: Draft, model: str) -> bool:
    # A task's fields may be asked for before it is known which task that is.
    trusted = {name: value for name, value in draft.asked.items() if name == _TRUST}
    folder = model_folder(Draft(trusted).recipe(model__path=model))
    try:
        read_config(folder)
    except InputError:
        try:
            return is_encoder(json_object(folder / CONFIG))
        except InputError:
            pass  # what is wrong with it is said where the model is looked at
    return False


def _looked_at(draft: Draft) -> TextClassInputs:
    """Model and data, checked as a run checks them; a token that fills rows is asked for.

    Raises:
        InputError: what is wrong with them.
    """
    try:
        return _look(draft)
    except InputError as error:
        end = _end_token(draft)
        if error.field != _PAD or _PAD in draft.asked or end is None:
            raise
        question = OpenQuestion(_PAD, "Which token fills rows that are shorter than others?", end)
        draft.question(question, "the model names no padding; its end of text, which is masked")
    return _look(draft)


def _look(draft: Draft) -> TextClassInputs:
    wanted: dict[str, Any] = {"data__validation_fraction": 0.0}  # all rows are counted
    if "data.sequence_length" not in draft.asked:
        wanted["data__sequence_length"] = 2
    recipe = draft.recipe(**wanted)
    found = task_of(recipe).look(recipe)
    assert isinstance(found, TextClassInputs)
    return found


def _end_token(draft: Draft) -> str | None:
    """The token that ends texts, as the tokenizer's files name it."""
    recipe = draft.recipe()
    folder = model_folder(recipe) if recipe.data.tokenizer is None else recipe.data.tokenizer
    try:
        found = json_object(Path(folder) / "tokenizer_config.json").get("eos_token")
    except InputError:
        return None
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) else None


def _lengths(inputs: TextClassInputs, documents: int) -> Lengths:
    """Tokens of the first two megabytes of the texts to train on."""
    texts, size = [], 0
    trained = zip(inputs.texts.rows, inputs.texts.flags, strict=True)
    for row, flag in trained:
        if flag:
            continue
        texts.append(row.texts)
        size += sum(map(len, row.texts))
        if size > SURVEYED_BYTES:
            break
    found = inputs.tokenizer.encode(texts, room=sys.maxsize)
    tokens = sorted(len(ids) for ids, _, _ in found)
    return Lengths(tuple(tokens), documents, exact=True)  # all rows were counted


def _describe_data(draft: Draft, lengths: Lengths, classes: int) -> None:
    path = draft.settings["data.path"]
    here = f"{path.why}; " if path.why else ""
    median = f"the median {lengths.quantile(0.5):,} tokens, the longest {lengths.tokens[-1]:,}"
    why = f"{here}texts: {lengths.documents:,} of {classes} classes, {median}"
    draft.set("data.path", path.value, why)


def _set_updates(draft: Draft, rows: int) -> int:
    """Set batch size and how long the run is; its updates, about."""
    size, _ = rules.batch_size(rows)
    batch = int(draft.set("training.batch_size", size, "texts in an update; BERT took 16 or 32"))
    draft.set("training.micro_batch_size", "auto", "how many at a time: the planner's choice")
    if "training.steps" in draft.asked:
        return int(draft.set("training.steps", 0, ""))
    if "training.tokens" in draft.asked:
        return math.ceil(rows / batch)
    epochs = draft.set("training.epochs", *rules.class_epochs())
    return math.ceil(float(epochs) * rows / batch)
