"""Whether a recipe's data is fit to train on: shares of its documents against named limits."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from modicum.core.errors import InputError
from modicum.core.progress import StageProgress
from modicum.core.ranks.ranks import Ranks
from modicum.data.parts import TEST, VALIDATION
from modicum.data.text_rows import TextRows
from modicum.data.view import DataFacts
from modicum.recipe import Recipe
from modicum.tasks import CausalLM, task_of
from modicum.tasks.parts import field_of_part
from modicum.tasks.text import TextData, prepared
from modicum.tasks.text_classes import TextClassTask
from modicum.tasks.text_facts import silent_examples, template_origin, text_facts
from modicum.tasks.text_stream import first_of
from modicum.verify.class_data import Count, class_counts
from modicum.verify.findings import Verification, Wanting


@dataclass(frozen=True)
class DataLimits:
    """The largest shares, from 0 to 1, of the documents that may be so.

    Args:
        shortened: of conversations without their earliest turns, as they are too long.
        truncated: of examples that lose the front of their prompt, or labelled texts their end.
        dropped: of examples that are left out, as they are too long for a row.
        duplicates: of documents that are the same as an earlier one.
        empty: of documents in which nothing is to be learned.
        silent: of examples whose answers are empty, so that their end alone is trained.
        contradicting: of labelled texts that are there with another label too.
        overlap: of the validation's documents that are trained on too.
        test_overlap: of the test's documents that are trained on, or in the validation, too.
        unended: of examples that train no end of text: a model learns from them not to stop.

    Raises:
        InputError: a limit is no share.

    >>> DataLimits(duplicates=0.2).overlap
    0.0
    """

    shortened: float = 0.05
    truncated: float = 0.05
    dropped: float = 0.01
    duplicates: float = 0.05
    empty: float = 0.01
    silent: float = 0.01
    contradicting: float = 0.01
    overlap: float = 0.0
    test_overlap: float = 0.0
    unended: float = 0.0

    def __post_init__(self) -> None:
        for name in self.names():
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise InputError("is no share", field=name, value=value, allowed="0 to 1")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Of all limits."""
        return tuple(each.name for each in fields(cls))


def verify_data(
    recipe: Recipe,
    limits: DataLimits | None = None,
    *,
    progress: StageProgress = lambda *_: None,
) -> Verification:
    """Prepare a recipe's text as a run would, in a temporary folder, and hold it against limits.

    Text, or labelled texts. Of a stream the first thousand documents are.

    The chat template must be the model's own where that has one.

    Raises:
        InputError: recipe or data is wrong, or the task is not of text.

    >>> import modicum
    >>> from modicum.verify import verify_data
    >>> data = {"include": ["json/**"], "sequence_length": 32, "validation_fraction": 0}
    >>> recipe = modicum.Recipe(data=data, model={"layers": 1, "width": 16, "vocabulary_size": 300})
    >>> verify_data(recipe).passed
    True
    """
    limits = limits or DataLimits()
    task = task_of(recipe)
    if isinstance(task, TextClassTask):
        counts = class_counts(recipe, task, progress)
        checks = [_check(limits, each) for each in counts]
        return Verification(checks, [_finding(c) for c in checks if c["share"] > c["limit"]])
    if not isinstance(task, CausalLM):
        problem = "only texts have documents to verify"
        raise InputError(problem, field="task.method", value=task.name)
    inputs = task.look(recipe)
    if recipe.data.streaming:
        recipe, inputs = first_of(recipe, inputs)
    with tempfile.TemporaryDirectory(prefix="modicum-verify-") as folder:
        data = prepared(recipe, inputs, Path(folder), progress, Ranks())
        progress("reading documents", 0, None)
        counts = _counts(recipe, data, text_facts(inputs, data))
        checks = [_check(limits, each) for each in counts]
    findings = [_finding(check) for check in checks if check["share"] > check["limit"]]
    origin = template_origin(inputs, recipe)
    if origin is not None:
        checks.append({"check": "chat_template", "origin": origin})
    if origin == "other":
        place, wanted = "data.chat_template", "the model's own template"
        findings.append(Wanting("chat_template", place, wanted, "another one, of the recipe"))
    return Verification(checks, findings)


def _counts(recipe: Recipe, data: TextData, facts: DataFacts) -> Iterator[Count]:
    """What each limit that says something of this data counts."""
    every = data.train.counts.documents
    for name in ("shortened", "truncated", "dropped"):
        yield Count(name, "data.sequence_length", data.counts.get(name, 0), every)
    yield Count("duplicates", "data.path", facts.duplicates, every)
    # What is empty may be left out before it is counted as a document.
    yield Count("empty", "data.path", facts.empty, max(every, facts.empty))
    for name, part, found, rows in (
        ("overlap", VALIDATION, facts.overlap, data.validation),
        ("test_overlap", TEST, facts.test_overlap, data.test),
    ):
        if found is not None:
            assert isinstance(rows, TextRows)
            place = field_of_part(recipe.data, part)
            yield Count(name, place, found, rows.counts.documents)
    silent = silent_examples(data)
    if facts.unended is not None and silent is not None:
        examples = [part.counts.documents for part in data.train.parts if part.store.examples]
        yield Count("silent", "data.path", silent, sum(examples))
        yield Count("unended", "data.path", facts.unended, sum(examples))


def _check(limits: DataLimits, counted: Count) -> dict[str, Any]:
    """A row of the verification."""
    return {
        "check": counted.name, "where": counted.where, "count": counted.count, "of": counted.of,
        "share": counted.count / max(counted.of, 1), "limit": getattr(limits, counted.name),
    }  # fmt: skip


def _finding(check: dict[str, Any]) -> Wanting:
    expected = f"at most {check['limit']:.3%} of the documents"
    found = f"{check['share']:.3%} ({check['count']:,} of {check['of']:,})"
    return Wanting(check["check"], check["where"], expected, found)
