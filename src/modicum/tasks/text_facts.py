"""Facts about a recipe's prepared text: its documents, and whose template writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from modicum.core.files import read_json
from modicum.data.text_rows import StoreRows, TextRows
from modicum.data.token_arrays import indexed, mapped
from modicum.data.tokenizer import Tokenizer
from modicum.data.view import DataFacts, facts_of
from modicum.recipe import Recipe
from modicum.tasks.text import TextData, TextInputs

# An answer that is empty trains its end, and what a template writes around it.
_AROUND = 4
TemplateOrigin = Literal["default", "model", "recipe", "same", "other"]


def text_facts(inputs: TextInputs, data: TextData) -> DataFacts:
    """Facts about the documents behind prepared rows; reads all of them."""
    ends = ends_of(data.tokenizer, inputs.model_folder)
    assert data.test is None or isinstance(data.test, TextRows)  # what is looked at is no stream
    return facts_of(inputs.source, ends, data.train, data.validation, data.test)


def silent_examples(data: TextData) -> int | None:
    """Examples of the training that train an end of text and no answer; None without examples."""
    parts = [part for part in data.train.parts if part.store.examples]
    return sum(_silent(part, data.tokenizer) for part in parts) if parts else None


def _silent(rows: StoreRows, tokenizer: Tokenizer) -> int:
    tokens = mapped(rows.store.tokens_file, rows.store.token_bytes)
    flags = mapped(rows.store.trained_file, 1)
    mask, found = 0xFFFF if rows.store.token_bytes == 2 else 0xFFFFFFFF, 0
    for first, length, _, trained in indexed(rows.store).t().tolist():
        if 0 < trained <= _AROUND:
            own = tokens[first : first + length][flags[first : first + length] != 0]
            found += not tokenizer.decode([token & mask for token in own.tolist()]).strip()
    return found


def template_origin(inputs: TextInputs, recipe: Recipe) -> TemplateOrigin | None:
    """Whose template writes the conversations; None where there are none.

    Returns:
        `default`: chatml, as the model is new. `model`: the model's own. `recipe`: the recipe's,
        and the model has none. `same` and `other`: the recipe's, and the model's own is the same
        one or another.
    """
    template = inputs.source.rows.template
    if inputs.source.rows.name not in ("messages", "sharegpt", "alpaca") or template is None:
        return None
    own = None if inputs.tokenizer is None else inputs.tokenizer.chat_template
    if recipe.data.chat_template is None:
        return "default" if own is None else "model"
    if own is None:
        return "recipe"
    return "same" if own.source.strip() == template.source.strip() else "other"


def ends_of(tokenizer: Tokenizer, folder: Path | None) -> frozenset[int]:
    """The tokens at which generation stops: the end, and those that the model's files name."""
    file = None if folder is None else folder / "generation_config.json"
    if file is None or not file.is_file():
        return frozenset([tokenizer.eos_id])
    listed = read_json(file).get("eos_token_id")
    more = listed if isinstance(listed, list) else [listed]
    return frozenset([tokenizer.eos_id, *(each for each in more if isinstance(each, int))])
