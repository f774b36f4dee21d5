"""The sources of a recipe's text, and the chat template that writes its conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modicum.core.errors import InputError
from modicum.core.files import read_text
from modicum.data.chat_template import ChatTemplate, special_tokens
from modicum.data.source_mix import SourceMix
from modicum.data.sources import Source, open_source
from modicum.data.tokenizer import Tokenizer
from modicum.recipe import Recipe, SourceSection


def sources(
    recipe: Recipe, tokenizer: Tokenizer | None = None
) -> tuple[Source | SourceMix, Source | None]:
    """The data that a recipe trains on, and what it evaluates on if that is other data.

    Raises:
        InputError: there is none, or conversations are there and no template that writes them.
    """
    data, template = recipe.data, chat_template(recipe, tokenizer)

    def opened(path: str | None, field: str, own: SourceSection | None = None) -> Source:
        def asked(name: str) -> Any:
            said = None if own is None else getattr(own, name)
            return getattr(data, name) if said is None else said

        source = open_source(
            path,
            include=asked("include"),
            exclude=asked("exclude"),
            column=asked("column"),
            prompt_column=asked("prompt_column"),
            rows=asked("format"),
            template=template,
            train_on=data.train_on,
            limit_bytes=asked("limit"),
            field=field,
        )
        if template is None and source.rows.name in ("messages", "sharegpt"):
            raise InputError(
                f"the rows are conversations (format {source.rows.name!r}), and the tokenizer has "
                "no chat template to write them with; name a file with one",
                field="data.chat_template",
                allowed="a file with a Jinja template",
            )
        return source

    validation = None
    if data.validation_path is not None:
        validation = opened(data.validation_path, "data.validation_path")
    parts = [
        opened(each.path, f"data.sources.{number}.path", each)
        for number, each in enumerate(data.sources)
    ]
    if not parts:
        return opened(data.path, "data.path"), validation
    weights = [each.weight for each in data.sources if each.weight is not None]
    return SourceMix(tuple(parts), tuple(weights) or None), validation


def chat_template(recipe: Recipe, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    """The recipe's chat template, or the tokenizer's own; None where neither has one.

    Raises:
        InputError: the file cannot be read.
    """
    own = None if tokenizer is None else tokenizer.chat_template
    if recipe.data.chat_template is None:
        return own
    try:
        source = read_text(Path(recipe.data.chat_template))
    except InputError as error:
        raise error.located(field="data.chat_template") from None
    tokens = {} if tokenizer is None else special_tokens(tokenizer.companions)
    return ChatTemplate(source, tokens)
