"""The sources of a recipe's text, and the chat template that writes its conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modicum.core.errors import InputError
from modicum.core.files import read_text
from modicum.data.chat_template import ChatTemplate
from modicum.data.named_templates import DEFAULT, END, NAMED
from modicum.data.source_mix import SourceMix
from modicum.data.sources import Source, open_source
from modicum.data.tokenizer import Tokenizer
from modicum.recipe import Recipe, SourceSection
from modicum.tasks.parts import check_files_apart, field_of_part, paths_of


def sources(
    recipe: Recipe, tokenizer: Tokenizer | None = None
) -> tuple[Source | SourceMix, dict[str, Source]]:
    """The data that a recipe trains on, and that of the other parts which have data of their own.

    Raises:
        InputError: there is none, conversations are there and no template that writes them, or what
            is evaluated is trained on.
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
            streaming=data.streaming,
            field=field,
        )
        if template is None and source.rows.name in ("messages", "sharegpt"):
            raise InputError(
                f"the rows are conversations (format {source.rows.name!r}), and the tokenizer has "
                "no chat template to write them with; name one, or a file with one",
                field="data.chat_template",
                allowed=f"{', '.join(NAMED)}, or a file with a Jinja template",
            )
        return source

    others = {
        part: opened(path, field_of_part(data, part)) for part, path in paths_of(data).items()
    }
    trained: dict[str, Source] = {}
    for number, each in enumerate(data.sources):
        field = f"data.sources.{number}.path"
        trained[field] = opened(each.path, field, each)
    if not trained:
        trained["data.path"] = opened(data.path, "data.path")
    check_files_apart(trained, others)
    parts = tuple(trained.values())
    if not data.sources:
        return parts[0], others
    weights = [each.weight for each in data.sources if each.weight is not None]
    return SourceMix(parts, tuple(weights) or None), others


def chat_template(recipe: Recipe, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    """The recipe's chat template, or the tokenizer's own; None where neither has one.

    Where the tokenizer is still to be trained, one of ours is the default.

    Raises:
        InputError: the file cannot be read, or the tokenizer has not what the template writes.
    """
    asked = recipe.data.chat_template
    if asked is None and tokenizer is not None:
        return tokenizer.chat_template
    if asked is None or asked in NAMED:
        return _named(asked or DEFAULT, tokenizer)
    if not Path(asked).exists():
        raise InputError(
            "is neither a template nor a file",
            field="data.chat_template",
            value=asked,
            allowed=f"{', '.join(NAMED)}, or a file with a Jinja template",
            candidates=NAMED,
            word=Path(asked).name,
        )
    try:
        source = read_text(Path(asked))
    except InputError as error:
        raise error.located(field="data.chat_template") from None
    known = {"eos_token": END} if tokenizer is None else tokenizer.special_tokens
    return ChatTemplate(source, known)


def _named(name: str, tokenizer: Tokenizer | None) -> ChatTemplate:
    template = NAMED[name]
    if tokenizer is None:
        return template
    inner, end = tokenizer.inner, template.tokens["eos_token"]
    missing = [token for token in template.special if inner.token_to_id(token) is None]
    stops = tokenizer.token(tokenizer.eos_id)
    if missing or (template.special and end != stops):
        why = (
            f"has no token {missing[0]}" if missing else f"ends texts with {stops}, not with {end}"
        )
        raise InputError(
            f"the tokenizer {why}, as this template does; take one without special tokens",
            field="data.chat_template",
            value=name,
            allowed=", ".join(each for each, found in NAMED.items() if not found.special),
        )
    return ChatTemplate(template.source, tokenizer.special_tokens)
