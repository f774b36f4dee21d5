"""`modicum data` of labelled texts: rows with their classes, and what is odd about them."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from modicum.cli.class_tables import class_table
from modicum.cli.plain_tables import printable
from modicum.cli.tables import table
from modicum.core.ranks.ranks import Ranks
from modicum.data.class_view import ClassRowView, class_facts, class_rows
from modicum.data.parts import PARTS, TEST
from modicum.recipe import Recipe
from modicum.tasks.base import Data
from modicum.tasks.text_class_data import LabelledTexts
from modicum.tasks.text_classes import TextClassTask


def show_classes(recipe: Recipe, task: TextClassTask, *, rows: int | None, as_json: bool) -> None:
    """Tokenize all rows in a temporary folder, print some, and count each class.

    Args:
        rows: how many are printed; None: all.

    Raises:
        InputError: what is wrong with the data.
    """
    inputs = task.look(recipe)
    with tempfile.TemporaryDirectory(prefix="modicum-data-") as folder:
        data = task.prepare(recipe, inputs, Path(folder), lambda *_: None, Ranks())
        sides = {side: list(class_rows(getattr(data, side))) for side in PARTS}
    shown = _Shown(inputs.texts, inputs.tokenizer.inner, sys.stdout)
    every = [(side, row) for side in PARTS for row in sides[side]]
    for number, (side, row) in enumerate(every[:rows]):
        (shown.line if as_json else shown.row)(number, side, row)
    if not as_json:
        _print_facts(inputs.texts, data, sides)


@dataclass(frozen=True)
class _Shown:
    """Rows as text, by the tokenizer that made them."""

    texts: LabelledTexts
    tokenizer: Any
    stream: TextIO

    def line(self, number: int, side: str, row: ClassRowView) -> None:
        """A row as a line of JSON."""
        text = self.tokenizer.decode(row.tokens, skip_special_tokens=False)
        label = self.texts.names[row.label]
        known = {"row": number, "side": side, "label": label, "text": text, "tokens": row.tokens}
        print(json.dumps(known), file=self.stream)

    def row(self, number: int, side: str, row: ClassRowView) -> None:
        """A row for people; what would move a terminal's cursor is left out."""
        label = self.texts.names[row.label]
        text = self.tokenizer.decode(row.tokens, skip_special_tokens=False)
        plain = printable(text)
        print(f"row {number}: {len(row.tokens)} tokens, {label}\n{plain}\n", file=self.stream)


def _print_facts(
    texts: LabelledTexts, data: Data[Any], sides: dict[str, list[ClassRowView]]
) -> None:
    """How many rows each class has, and what is odd about them."""
    counts = {
        part: {
            name: sum(row.label == number for row in rows)
            for number, name in enumerate(texts.names)
        }
        for part, rows in sides.items()
        if rows or part != TEST
    }
    class_table(counts, texts.names, texts.described)
    facts = class_facts(sides)
    lengths = f"{facts.shortest:,} to {facts.longest:,} tokens, the median {facts.median:,}"
    odd: list[Sequence[str]] = [
        ("rows", f"{sum(map(len, sides.values())):,}", lengths),
        ("truncated", f"{data.counts['truncated']:,}", "their end is left out"),
        ("dropped", f"{data.counts['dropped']:,}", "longer than data.sequence_length"),
        ("empty", f"{data.counts['empty']:,}", "left out"),
        ("duplicates", f"{facts.duplicates:,}", "the same as an earlier row of the class"),
        ("contradicting", f"{facts.contradicting:,}", "texts with several classes"),
        ("overlap", f"{facts.overlap:,}", "rows of the validation that train too"),
    ]
    if sides[TEST]:
        words = "rows of the test that train, or are in the validation, too"
        odd.append(("overlap of the test", f"{facts.test_overlap:,}", words))
    table(("Data", "Count", ""), odd)
