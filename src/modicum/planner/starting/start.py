"""From a model, data and a budget to a recipe: everything is looked at as a run would."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modicum.core.contracts.catalog import built_in
from modicum.core.errors import InputError
from modicum.core.units import parse_count
from modicum.data.named_templates import DEFAULT, NAMED
from modicum.planner.starting import rules
from modicum.planner.starting.classes import CLASSES, set_task, start_classes
from modicum.planner.starting.common import Start, model_facts, planned, set_budget, set_pace
from modicum.planner.starting.data import chosen_data, look_at_columns
from modicum.planner.starting.draft import Ask, Draft, OpenQuestion, fields_of, take_default
from modicum.planner.starting.lengths import Lengths, measured, row_length, text_length
from modicum.planner.starting.method import check_method, choose_method
from modicum.planner.starting.stored import stored_dtype
from modicum.recipe import Recipe
from modicum.tasks import task_of
from modicum.tasks.text import TextInputs, packs
from modicum.tasks.text_parts import parts_of

# Tokens in a row of continuous text, at most: of a new model, and of a trained one.
_NEW_LENGTH, _TRAINED_LENGTH = 256, 1024
_TASK = "causal_lm"
_TEMPLATE, _BOUNDARIES = "data.chat_template", "data.boundaries"
_NEW_MODEL = {
    "layers": (4, "a new model; for a trained one: modicum init --model FOLDER"),
    "width": (256, "of the residual stream"),
    "heads": (4, "of attention"),
    "vocabulary_size": (4096, "tokens, of a tokenizer that is trained on the data"),
}


def start(
    model: str | None = None,
    data: str | None = None,
    *,
    memory: str | None = None,
    method: str | None = None,
    asked: Mapping[str, Any] | None = None,
    ask: Ask = take_default,
) -> Start:
    """Look at a model and at data, and make a recipe of what is found.

    Args:
        model: a model folder; None for a new model.
        data: as `data.path` of a recipe; None for Python's standard library.
        memory: the budget, as in 8GB; None for what is free.
        method: `full` or an adapter; None: full training where it fits, else LoRA.
        asked: fields of the recipe that are to have these values, by dotted name.
        ask: answers questions that model and data leave open.

    Raises:
        InputError: model or data are missing, broken or not supported, or do not go together.

    >>> from modicum.planner.starting import start
    >>> start(asked={"data.include": ["json/**"]}).recipe.data.sequence_length
    128
    """
    draft = Draft(fields_of(asked or {}), ask)
    method = method or draft.asked.get("adapter.method")
    task = draft.asked.get("task.method", _TASK)
    if isinstance(task, str) and task not in (_TASK, CLASSES) and built_in(task) is not None:
        raise _not_made(task)  # before columns are looked for that such data do not have
    model, data = draft.asked.get("model.path", model), draft.asked.get("data.path", data)
    check_method(method, model)
    of_classes = set_task(draft, model)
    _set_model(draft, model)
    chosen_data(draft, data)
    set_budget(draft, memory)
    draft.recipe()  # what is asked for is checked before anything is read
    if of_classes:
        return start_classes(draft, method)
    columns = look_at_columns(draft)
    inputs = _looked_at(draft)
    dtype = None if inputs.model_folder is None else stored_dtype(inputs.model_folder)
    facts = model_facts(draft, inputs, dtype)
    _describe_template(draft, inputs)
    lengths, tokenizer = measured(inputs.source, inputs.tokenizer, inputs.config.vocabulary_size)
    _describe_data(draft, inputs, lengths)
    _set_rows(draft, inputs, lengths, model is None)
    _describe_boundaries(draft, inputs)
    counts = task_of(draft.recipe()).survey(draft.recipe(), replace(inputs, tokenizer=tokenizer))
    updates = _set_updates(draft, inputs, counts, lengths.documents, model is None)
    adapter = choose_method(draft, inputs, method, dtype) if model is not None else None
    _set_schedule(draft, inputs, updates, adapter, model is None)
    draft.take_asked()
    made, refused = planned(draft)
    found = {
        **columns, "described": inputs.source.describe(), "continuous": inputs.source.continuous,
        "unit": "document", "documents": lengths.documents, "exact": lengths.exact,
        "median": lengths.quantile(0.5), "longest": lengths.tokens[-1], "rows": counts["rows"],
    }  # fmt: skip
    return Start(draft, draft.recipe(), facts, found, made, refused)


def _set_model(draft: Draft, model: str | None) -> None:
    if model is not None:
        draft.set("model.path", model, "")
        return
    for name, (value, why) in _NEW_MODEL.items():
        draft.set(f"model.{name}", value, why)


def _looked_at(draft: Draft) -> TextInputs:
    """Model and data, checked as a run checks them; a chat template that is missing is asked for.

    Raises:
        InputError: what is wrong with them.
    """
    try:
        return _look(draft)
    except InputError as error:
        if error.field != _TEMPLATE or _TEMPLATE in draft.asked:
            raise
        text = f"A chat template for the conversations: {', '.join(NAMED)}, or a file?"
        why = "the model has no template of its own; this one goes with its tokenizer"
        draft.question(OpenQuestion(_TEMPLATE, text, _template_for(draft, error)), why)
    return _look(draft)


def _look(draft: Draft, template: str | None = None) -> TextInputs:
    wanted: dict[str, Any] = {"data__sequence_length": 2, "data__validation_fraction": 0.0}
    if template is not None:
        wanted["data__chat_template"] = template
    wanted = {k: v for k, v in wanted.items() if k.replace("__", ".") not in draft.asked}
    recipe = draft.recipe(**wanted)
    found = task_of(recipe).look(recipe)
    if not isinstance(found, TextInputs):
        raise _not_made((recipe.task or {}).get("method"))
    return found


def _not_made(task: Any) -> InputError:
    return InputError(
        "recipes of this task are not made here; `modicum methods --room tasks` shows what one "
        "takes",
        field="task.method",
        value=task,
    )


def _template_for(draft: Draft, refused: InputError) -> str:
    """The first of the named templates that the tokenizer goes with.

    Raises:
        InputError: none; what the data was refused with.
    """
    for name in NAMED:
        try:
            _look(draft, name)
        except InputError as error:
            if error.field != _TEMPLATE:
                raise
        else:
            return name
    raise refused


def _describe_template(draft: Draft, inputs: TextInputs) -> None:
    """Say what writes the conversations, where there are any."""
    if not inputs.source.rows.conversations or _TEMPLATE in draft.settings:
        return
    if inputs.tokenizer is None:
        draft.set(_TEMPLATE, DEFAULT, "what writes conversations for a new model")
    elif "data.format" in draft.settings and _TEMPLATE not in draft.asked:
        found = draft.settings["data.format"]
        why = f"{found.why}; written by the model's own chat template"
        draft.set("data.format", found.value, why)


def _describe_boundaries(draft: Draft, inputs: TextInputs) -> None:
    """Say whether documents that share a row are kept apart, where that has its price."""
    if packs(inputs.config, draft.recipe().data.sequence_length):
        return
    parallel = draft.recipe().parallel
    sharded = parallel.strategy == "fsdp" if parallel.shard is None else parallel.shard > 1
    if sharded:
        why = (
            "a document sees those before it in its row: this model keeps them apart by computing "
            "one at a time, which sharded weights do not go with"
        )
    else:
        why = (
            "kept apart by computing the documents of a row one at a time, as this model needs; "
            "false is faster, and a document then sees those before it in its row"
        )
    draft.set(_BOUNDARIES, not sharded, why)


def _describe_data(draft: Draft, inputs: TextInputs, lengths: Lengths) -> None:
    if "data.path" not in draft.settings:
        return  # several sources, which were asked for
    count = f"{lengths.documents:,}" if lengths.exact else f"about {lengths.documents:,}"
    median, longest = lengths.quantile(0.5), lengths.tokens[-1]
    path = draft.settings["data.path"]
    here = f"{path.why}; " if path.why else ""
    why = f"{here}documents: {count}, the median {median:,} tokens, the longest {longest:,}"
    draft.set("data.path", path.value, why)


def _set_rows(draft: Draft, inputs: TextInputs, lengths: Lengths, new: bool) -> None:
    """Set how long rows are, and what is held out."""
    context = None if new else inputs.config.context
    if inputs.source.continuous:
        tokens = round(sum(lengths.tokens) / len(lengths.tokens) * lengths.documents)
        most = _NEW_LENGTH if new else _TRAINED_LENGTH
        length, why = text_length(tokens, context, most)
    else:
        length, why = row_length(lengths, context)
    draft.set("data.sequence_length", length, why)
    if not draft.has("data.validation_path"):
        counted = lengths.exact and not lengths.left_out and len(parts_of(inputs.source)) == 1
        seed = draft.asked.get("training.seed", Recipe().training.seed) if counted else None
        part, why = rules.held_out(lengths.documents, not inputs.source.continuous, seed)
        draft.set("data.validation_fraction", part, why)


def _set_updates(
    draft: Draft, inputs: TextInputs, counts: Mapping[str, Any], documents: int, new: bool
) -> int:
    """Set batch size and how long the run is; its updates, about."""
    rows = max(1, int(counts["rows"]))
    batch = int(draft.set("training.batch_size", *rules.batch_size(rows)))
    draft.set("training.micro_batch_size", "auto", "how many at a time: the planner's choice")
    if "training.tokens" in draft.asked:
        tokens = parse_count(draft.set("training.tokens", 0, ""))
        return -(-tokens // (batch * draft.recipe().data.sequence_length))
    endless = inputs.source.continuous or draft.recipe().data.streaming
    if endless and "training.epochs" not in draft.asked:
        return int(draft.set("training.steps", *rules.steps(rows, batch)))
    if "training.steps" in draft.asked:
        return int(draft.set("training.steps", 0, ""))
    return int(draft.set("training.epochs", *rules.epochs(documents, new=new)) * rows / batch) or 1


def _set_schedule(
    draft: Draft, inputs: TextInputs, updates: int, adapter: str | None, new: bool
) -> None:
    rate = rules.learning_rate(inputs.config.parameter_count(), new=new, adapter=adapter)
    draft.set("training.learning_rate", *rate)
    set_pace(draft, updates, rules.warmup_steps(updates, new))
