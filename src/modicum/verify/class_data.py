"""How many labelled texts of a recipe are odd: too long, empty, there twice, or with two labels."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from modicum.core.progress import StageProgress
from modicum.core.ranks.ranks import Ranks
from modicum.data.class_view import class_facts, class_rows
from modicum.data.parts import PARTS, TEST, VALIDATION
from modicum.recipe import Recipe
from modicum.tasks.parts import field_of_part
from modicum.tasks.text_classes import TextClassTask


@dataclass(frozen=True)
class Count:
    """How many documents are so, of how many.

    Args:
        name: of the limit.
        where: the recipe's field that decides it.
    """

    name: str
    where: str
    count: int
    of: int


def class_counts(recipe: Recipe, task: TextClassTask, progress: StageProgress) -> Iterator[Count]:
    """Prepare the rows in a temporary folder, and count.

    Raises:
        InputError: recipe or data is wrong.
    """
    inputs = task.look(recipe)
    with tempfile.TemporaryDirectory(prefix="modicum-verify-") as folder:
        data = task.prepare(recipe, inputs, Path(folder), progress, Ranks())
        sides = {side: list(class_rows(getattr(data, side))) for side in PARTS}
    facts, counts = class_facts(sides), data.counts
    trained, held, tested = (len(sides[side]) for side in PARTS)
    every = trained + held + tested + counts["dropped"] + counts["empty"]
    for name in ("truncated", "dropped"):
        yield Count(name, "data.sequence_length", counts[name], every)
    yield Count("duplicates", "data.path", facts.duplicates, trained)
    # Of a blank text the special tokens are left, so a row of tokens does not show it.
    blank = sum(not "".join(row.texts).strip() for row in inputs.texts.rows)
    yield Count("empty", "data.path", blank, len(inputs.texts.rows))
    yield Count("contradicting", "data.path", facts.contradicting, trained)
    if held:
        yield Count("overlap", field_of_part(recipe.data, VALIDATION), facts.overlap, held)
    if tested:
        yield Count("test_overlap", field_of_part(recipe.data, TEST), facts.test_overlap, tested)
