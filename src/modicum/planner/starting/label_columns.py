"""Which columns of a file of rows hold the texts of a classifier, and which their classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from modicum.core.errors import InputError
from modicum.data.sources import Source, open_source
from modicum.planner.starting.columns import PROMPTS, TEXTS, first_rows
from modicum.planner.starting.draft import Draft, OpenQuestion

TEXT_FIELD, LABEL_FIELD = "task.text_columns", "task.label_column"
# Names that say what a column holds, the plainest first.
LABELS = (
    *("label", "labels", "class", "category", "target", "intent", "sentiment", "topic", "tag"),
    *("label_text", "label_name", "rating", "stars", "y"),
)
# Next to a class these are people, places and products more often than texts.
NOT_READ = ("user", "source", "code")
PAIRS = (
    *(("premise", "hypothesis"), ("sentence1", "sentence2"), ("question1", "question2")),
    *(("text1", "text2"), ("text_a", "text_b"), ("question", "sentence"), ("query", "passage")),
    ("question", "passage"),
)


def look_at_labels(draft: Draft) -> dict[str, Any]:
    """Set the columns of texts and classes, where they are not asked for; both as plain values.

    Raises:
        InputError: the data is not there or cannot be read, or no column holds text or classes.
    """
    data = draft.recipe().data
    source = open_source(data.path, include=data.include, exclude=data.exclude)
    try:
        if rows := first_rows(source):
            _set_columns(draft, rows, source)
    except InputError as error:
        raise error.located(field="data.path") from None
    task = draft.recipe().task or {}
    return {
        "path": data.path, "text_columns": list(task.get("text_columns", ("text",))),
        "label_column": task.get("label_column", "label"),
    }  # fmt: skip


def _set_columns(draft: Draft, rows: Sequence[Mapping[str, Any]], source: Source) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = {name: [row.get(name) for row in rows] for name in names}
    strings = [name for name in names if all(isinstance(c, str) for c in cells[name])]
    kinds = [name for name in names if all(_is_label(c) for c in cells[name])]
    known = {name.lower(): name for name in reversed(names)}
    named = [known[name] for name in LABELS if name in known]
    # One in which a class is missing is refused with its line, not passed over for another column.
    label = next(iter([*(name for name in named if name in kinds), *named]), None)
    label = draft.asked.get(LABEL_FIELD, label)
    if TEXT_FIELD in draft.asked:
        texts = list(draft.asked[TEXT_FIELD])
    else:
        texts = _set_texts(draft, source, cells, [name for name in strings if name != label])
    if label is None:
        _ask_label(draft, source, cells, [name for name in kinds if name not in texts])
        return
    unread = ", ".join(name for name in names if name not in (label, *texts))
    draft.set(LABEL_FIELD, label, f"the class of each{f'; not read: {unread}' * bool(unread)}")


def _set_texts(
    draft: Draft, source: Source, cells: Mapping[str, list[Any]], strings: list[str]
) -> list[str]:
    """Set which columns are read: a pair or one that is called so, else the longest."""
    plain = {name.lower(): name for name in reversed(strings)}
    for pair in PAIRS:
        if all(name in plain for name in pair):
            found = [plain[name] for name in pair]
            draft.set(TEXT_FIELD, found, "pairs of texts, which are read together")
            return found
    likely = [name for name in (*TEXTS, *PROMPTS) if name not in NOT_READ]
    one = next((plain[name] for name in likely if name in plain), None)
    if one is None and len(strings) == 1:
        one = strings[0]
    if one is not None:
        draft.set(TEXT_FIELD, [one], "what is read")
        return [one]
    if not strings:
        raise InputError(
            f"no column holds texts to tell apart; name one with `--set {TEXT_FIELD}=[NAME]`",
            file=source.title,
            value=", ".join(cells),
        )
    longest = max(strings, key=lambda name: mean(map(len, cells[name])))
    question = OpenQuestion(TEXT_FIELD, "Which column holds the text?", longest, tuple(strings))
    answer = draft.question(question, "a guess: the longest of the columns")
    draft.set(TEXT_FIELD, [answer], draft.settings[TEXT_FIELD].why)
    return [answer]


def _ask_label(
    draft: Draft, source: Source, cells: Mapping[str, list[Any]], kinds: list[str]
) -> None:
    """Ask which column holds the classes; the default is that of the fewest different ones."""
    counts = {name: len(set(cells[name])) for name in kinds}
    # A file that is sorted by class may have one value in its first rows.
    most = max(10, max(map(len, cells.values())) // 2)
    few = {name: count for name, count in counts.items() if count <= most}
    if not few:
        raise InputError(
            f"no column holds classes; name one with `--set {LABEL_FIELD}=NAME`",
            file=source.title,
            value=", ".join(cells),
            allowed="a column of names or integers, such as `label`",
        )
    fewest = min(few, key=lambda name: (few[name] == 1, few[name]))
    question = OpenQuestion(
        LABEL_FIELD, "Which column holds the class of each text?", fewest, tuple(kinds)
    )
    draft.question(question, "a guess: the column with the fewest different values")


def _is_label(cell: Any) -> bool:
    return isinstance(cell, int) or (isinstance(cell, str) and bool(cell.strip()))
