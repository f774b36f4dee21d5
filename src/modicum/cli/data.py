"""`modicum data`: what a recipe would train on, row by row, and what is odd about it."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from modicum import recipe_yaml
from modicum.cli.plain_tables import printable
from modicum.core.errors import InputError
from modicum.data.fitting import too_long_words
from modicum.data.parts import HELD
from modicum.report.numbers import percent

if TYPE_CHECKING:
    from modicum.data.fitting import PackingCounts
    from modicum.data.tokenizer import Tokenizer
    from modicum.data.view import DataFacts, RowView
    from modicum.tasks.text import TextData, TextInputs
    from modicum.tasks.text_facts import TemplateOrigin

_GREEN, _PLAIN = "\033[32m", "\033[0m"
_BEGIN, _END = "⟦", "⟧"  # around what is trained, where there are no colours


def show(recipe: str, overrides: Sequence[str], *, rows: int | None, as_json: bool) -> None:
    """Prepare a recipe's data in a temporary folder and print rows and facts.

    Args:
        rows: how many are printed; None: all.

    Raises:
        InputError: something about recipe or data is wrong, or the task is not of text.
    """
    from modicum.cli.class_data import show_classes
    from modicum.cli.image_data import show_images
    from modicum.core.ranks.ranks import Ranks
    from modicum.data.view import view_of
    from modicum.tasks import CausalLM, task_of
    from modicum.tasks.image_origins import OwnImages
    from modicum.tasks.images import ImageTask
    from modicum.tasks.text import prepared
    from modicum.tasks.text_classes import TextClassTask
    from modicum.tasks.text_facts import template_origin, text_facts
    from modicum.tasks.text_stream import first_of

    with recipe_yaml.places(recipe, overrides):
        asked = recipe_yaml.load(recipe, overrides).anchored()
        task = task_of(asked)
        if isinstance(task, ImageTask) and isinstance(task.origin, OwnImages):
            show_images(asked, task, task.origin, rows=rows, as_json=as_json)
            return
        if isinstance(task, TextClassTask):
            show_classes(asked, task, rows=rows, as_json=as_json)
            return
        if not isinstance(task, CausalLM):
            raise InputError(
                "only text, and images of your own (task.data_path), have rows to look at",
                field="task.method",
                value=task.name,
            )
        inputs = task.look(asked)
        if asked.data.streaming:
            asked, inputs = first_of(asked, inputs)
        with tempfile.TemporaryDirectory(prefix="modicum-data-") as folder:
            data = prepared(asked, inputs, Path(folder), lambda *_: None, Ranks())
            every = len(data.train)
            count = every if rows is None else min(rows, every)
            for index in range(count):
                view = view_of(data.train, index)
                if as_json:
                    _print_line(index, view, data.tokenizer)
                else:
                    _print_row(index, view, data.tokenizer, sys.stdout)
            if not as_json:
                words = _template_words(template_origin(inputs, asked))
                _print_facts(inputs, data, text_facts(inputs, data), words)
            if count and not as_json:
                print(_legend(sys.stdout))


def _print_line(index: int, view: RowView, tokenizer: Tokenizer) -> None:
    text = tokenizer.decode(view.tokens, skip_special_tokens=False)
    row = {"row": index, "text": text, "tokens": view.tokens, "trained": view.trained}
    print(json.dumps(row, ensure_ascii=True))


def _print_row(index: int, view: RowView, tokenizer: Tokenizer, stream: TextIO) -> None:
    begin, end = (_GREEN, _PLAIN) if stream.isatty() else (_BEGIN, _END)
    stream.write(f"row {index}: {len(view.tokens)} tokens, {sum(view.trained)} trained\n")
    for tokens, trained in view.parts():
        text = printable(tokenizer.decode(tokens, skip_special_tokens=False))
        stream.write(f"{begin}{text}{end}" if trained else text)
    stream.write("\n\n")


def _legend(stream: TextIO) -> str:
    """What the marks in the rows mean."""
    around = f"between {_BEGIN} and {_END}"
    return f"What is learned in a row is {'green' if stream.isatty() else around}."


def _print_facts(
    inputs: TextInputs, data: TextData, facts: DataFacts, template: str | None
) -> None:
    from modicum.cli.tables import source_rows, table

    counts = data.train.counts
    lines: list[Sequence[Any]] = [
        ("data", "", inputs.described),
        ("documents", *_documents(inputs, data, facts)),
        ("rows", f"{counts.rows:,}", f"{percent(counts.waste)} of them is padding"),
        ("trained tokens", f"{counts.trained:,}", ""),
    ]
    for part, counts in _held(data).items():
        documents = f"{counts.documents:,} documents, {counts.trained:,} tokens to evaluate on"
        lines.append((f"{part} rows", f"{counts.rows:,}", documents))
    lines += source_rows(data.counts)
    if words := too_long_words(data.counts):
        lines.append(("too long for a row", "", words))
    if template is not None:
        lines.append(("chat template", "", template))
    lines.append(("duplicates", f"{facts.duplicates:,}", "the same as an earlier document"))
    lines.append(("empty", f"{facts.empty:,}", "left out, as nothing is to be learned in them"))
    if facts.overlap is not None:
        lines.append(
            ("overlap", f"{facts.overlap:,}", "documents of the validation that train too")
        )
    if facts.test_overlap is not None:
        words = "documents of the test that train, or are in the validation, too"
        lines.append(("overlap of the test", f"{facts.test_overlap:,}", words))
    if facts.unended is not None:
        lines.append(("without an end", f"{facts.unended:,}", "no end of text is trained in them"))
    table(("Data", "Count", ""), lines)


def _held(data: TextData) -> dict[str, PackingCounts]:
    """What packing made of each part that is held out."""
    from modicum.data.text_rows import TextRows

    return {part: rows.counts for part in HELD if isinstance(rows := getattr(data, part), TextRows)}


def _documents(inputs: TextInputs, data: TextData, facts: DataFacts) -> tuple[str, str]:
    """How many there are, which is what `modicum init` counts, and how many of them train.

    Those of parts that have files of their own are not counted.
    """
    trained, lengths = data.train.counts.documents, _lengths(facts)
    held = sum(
        counts.documents for part, counts in _held(data).items() if part not in inputs.others
    )
    if not held:
        return f"{trained:,}", lengths
    return f"{trained + held:,}", f"{trained:,} train and {held:,} are held out; {lengths}"


def _lengths(facts: DataFacts) -> str:
    return f"{facts.shortest:,} to {facts.longest:,} tokens, the median {facts.median:,}"


def _template_words(origin: TemplateOrigin | None) -> str | None:
    """Which template writes the conversations; None where there are none."""
    words = {
        "default": "chatml, as the model is new",
        "model": "the model's own",
        "recipe": "the recipe's; the model has none",
        "same": "the recipe's, the same as the model's own",
        "other": "the recipe's, NOT the model's",
    }
    return None if origin is None else words[origin]
