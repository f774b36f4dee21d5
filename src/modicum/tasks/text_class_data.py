"""What a run on labelled texts reads: rows with their classes, both sides, and their tokens."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modicum.core.errors import InputError
from modicum.core.files import file_digest, read_json
from modicum.core.progress import StageProgress
from modicum.core.ranks.ranks import Ranks
from modicum.data.bucket_sampler import BucketSampler
from modicum.data.labelled_texts import (
    LabelledText,
    class_names,
    held_out,
    numbered,
    read_labelled,
)
from modicum.data.pair_tokenizer import PairTokenizer
from modicum.data.sampler import Sampler
from modicum.data.sources import Source, open_source
from modicum.data.text_classes import (
    COUNTS,
    EncodedRow,
    Padding,
    TextClassBatch,
    read_side,
    write_rows,
)
from modicum.recipe import Recipe
from modicum.tasks.base import Data

if TYPE_CHECKING:
    from modicum.tasks.text_classes import TextClasses

# Fields of a recipe's data that say nothing of labelled texts.
_UNREAD = (
    *("sources", "format", "column", "prompt_column", "chat_template", "train_on", "boundaries"),
)


@dataclass(frozen=True)
class LabelledTexts:
    """Rows of both sides, in the order in which they were read, and the names of their classes.

    Args:
        held: the places of those that are evaluated.
        labels: the number of each row's class.
        digest: SHA-256 of all that decides the rows.
        titles: of the training data, and of the validation data where that is of its own.
        files: that they were read from.
    """

    rows: tuple[LabelledText, ...]
    labels: tuple[int, ...]
    held: frozenset[int]
    names: tuple[str, ...]
    digest: str
    titles: tuple[str, ...]
    files: tuple[Path, ...] = ()

    @property
    def described(self) -> str:
        """One phrase for people: what was read, and how many texts are trained and evaluated."""
        train, *other = self.titles
        held, classes = len(self.held), f"of {len(self.names)} classes"
        if other:
            trained = f"{train}, {len(self.rows) - held:,} texts {classes}"
            return f"{trained}; validation: {other[0]}, {held:,} texts"
        kept = f", {held:,} of them for validation" if held else ""
        return f"{train}, {len(self.rows):,} texts {classes}{kept}"

    def counts(self) -> dict[str, Any]:
        """How many rows are trained, and how many of them each class has."""
        own = Counter(label for place, label in enumerate(self.labels) if place not in self.held)
        classes = {name: own[number] for number, name in enumerate(self.names)}
        return {"rows": sum(classes.values()), "classes": classes}


def labelled_texts(recipe: Recipe, asked: TextClasses) -> LabelledTexts:
    """Read all rows of a recipe's data.

    Raises:
        InputError: with the recipe's field, or the file and line at fault.
    """
    data = recipe.data
    check_data(recipe)
    train = _rows(recipe, asked, data.path, "data.path")
    source, rows = train
    try:
        names = class_names(rows, asked.classes)
        labels = [numbered(row, names, listed=bool(asked.classes)) for row in rows]
    except InputError as error:
        raise error.located(field="task.label_column") from None
    digests, files = [source.fingerprint()], list(source.files)
    titles = [source.describe()]
    if data.validation_path is None:
        groups = [" ".join(row.texts) for row in rows]
        held = held_out(labels, groups, data.validation_fraction, recipe.training.seed)
        if data.validation_fraction and not held:
            raise InputError(
                "no class has so many rows that one is held out; raise it, or set it to 0",
                field="data.validation_fraction",
                value=data.validation_fraction,
            )
    else:
        other, more = _rows(recipe, asked, data.validation_path, "data.validation_path")
        digests.append(other.fingerprint())
        files += other.files
        titles.append(other.describe())
        held = set(range(len(rows), len(rows) + len(more)))
        try:
            labels += [numbered(row, names, listed=bool(asked.classes)) for row in more]
        except InputError as error:
            raise error.located(field="data.validation_path") from None
        rows = [*rows, *more]
    how = [
        digests,
        asked.model_dump(mode="json"),
        data.sequence_length,
        data.too_long,
        sorted(held),
    ]
    digest = hashlib.sha256(json.dumps(how, sort_keys=True).encode()).hexdigest()
    paths = tuple(file.path for file in files)
    return LabelledTexts(
        tuple(rows), tuple(labels), frozenset(held), names, digest, tuple(titles), paths
    )


def check_data(recipe: Recipe) -> None:
    """Refuse what means nothing to labelled texts.

    Raises:
        InputError: such a field is set.
    """
    data = recipe.data
    for name in _UNREAD:
        if getattr(data, name) != type(data).model_fields[name].default:
            raise InputError(
                "means nothing to a task of classes, whose columns are named in `task`; leave it "
                "out",
                field=f"data.{name}",
            )
    if data.path is None:
        raise InputError(
            "a task of classes needs rows with a text and a label each; name them here",
            field="data.path",
        )
    if data.too_long == "split":
        raise InputError(
            "a text has one label, so it is not split",
            field="data.too_long",
            value="split",
            allowed="truncate, drop, refuse",
        )


def _rows(
    recipe: Recipe, asked: TextClasses, path: str | None, field: str
) -> tuple[Source, list[LabelledText]]:
    data = recipe.data
    source = open_source(
        path,
        include=data.include,
        exclude=data.exclude,
        column=asked.text_columns[0],
        rows="text",
        limit_bytes=data.limit,
        field=field,
    )
    try:
        return source, list(read_labelled(source, asked.text_columns, asked.label_column))
    except InputError as error:
        raise _of_recipe(error, asked) if error.file else error.located(field=field) from None


def _of_recipe(error: InputError, asked: TextClasses) -> InputError:
    """What is wrong with a row, with the recipe's field that names the column."""
    named = dict.fromkeys(asked.text_columns, "task.text_columns")
    named[asked.label_column] = "task.label_column"
    if error.field not in named:
        return error
    return error.fixed_by(f"{named[error.field]} names this column")


def prepared(
    recipe: Recipe,
    texts: LabelledTexts,
    tokenizer: PairTokenizer,
    padding: Padding,
    folder: Path,
    progress: StageProgress,
    ranks: Ranks,
    *,
    buckets: bool,
) -> Data[TextClassBatch]:
    """Tokenize all rows once, by rank 0, into the run folder, and map what it wrote.

    Args:
        buckets: whether the rows of one update are of similar length.

    Raises:
        InputError: a row is too long and the recipe refuses that, or nothing is left.
    """
    target, own = folder / "data", folder / "tokenizer"
    made_from = [texts.digest, {file.name: file_digest(file) for file in tokenizer.files}]

    def work() -> None:
        known = read_json(target / COUNTS) if (target / COUNTS).is_file() else {}
        if not ranks.first or known.get("made_from") == made_from:
            return
        progress("tokenizing", 0, len(texts.rows))
        rows, held, counts = _encoded(recipe, texts, tokenizer)
        write_rows(target, rows, held, {**counts, "made_from": made_from})
        own.mkdir(parents=True, exist_ok=True)
        for file in tokenizer.files:
            shutil.copyfile(file, own / file.name)

    ranks.first_alone(work, lambda: progress("tokenizing", 0, None))
    counts = {key: n for key, n in read_json(target / COUNTS).items() if key != "made_from"}
    train = read_side(target, "train", padding)
    if train is None:
        raise InputError("no row is left to train on", field="data.path", value=recipe.data.path)
    numbers = train.labels.bincount(minlength=len(texts.names)).tolist()
    training = recipe.training
    return Data(
        train=train,
        validation=read_side(target, "validation", padding),
        sampler=(
            BucketSampler(train.lengths, training.batch_size, training.seed)
            if buckets
            else Sampler(len(train), training.batch_size, training.seed)
        ),
        identity={"made_from": made_from},
        files=tuple(sorted(own.glob("*"))),
        counts={
            "rows": len(train),
            "classes": dict(zip(texts.names, numbers, strict=True)),
            **counts,
        },
    )


def _encoded(
    recipe: Recipe, texts: LabelledTexts, tokenizer: PairTokenizer
) -> tuple[list[EncodedRow], set[int], dict[str, int]]:
    """Rows that are kept, the places of those to evaluate on, and what became of the others."""
    room, policy = recipe.data.sequence_length, recipe.data.too_long
    found = tokenizer.encode([row.texts for row in texts.rows], room)
    kept: list[EncodedRow] = []
    held: set[int] = set()
    counts = {"truncated": 0, "dropped": 0, "empty": 0}
    for place, (ids, types, truncated) in enumerate(found):
        if truncated and policy == "refuse":
            raise InputError(
                f"the text of {texts.rows[place].origin} has more tokens than a row",
                field="data.sequence_length",
                value=room,
            )
        if truncated and policy == "drop":
            counts["dropped"] += 1
        elif not ids:
            counts["empty"] += 1
        else:
            counts["truncated"] += truncated
            if place in texts.held:
                held.add(len(kept))
            kept.append(EncodedRow(ids, types, texts.labels[place]))
    return kept, held, counts
