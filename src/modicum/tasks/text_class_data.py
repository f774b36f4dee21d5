"""What a run on labelled texts reads: rows with their classes, of all parts, and their tokens."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modicum.core.errors import InputError
from modicum.core.files import file_digest, publish_folder, read_json
from modicum.core.progress import StageProgress
from modicum.core.ranks.ranks import Ranks
from modicum.data.bucket_sampler import BucketSampler
from modicum.data.encoding import beyond
from modicum.data.labelled_texts import (
    LabelledText,
    class_names,
    numbered,
    read_labelled,
)
from modicum.data.pair_tokenizer import PairTokenizer
from modicum.data.parts import PARTS, TEST, TRAIN, VALIDATION, order_key
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
from modicum.tasks.parts import check_files_apart, draw_of, field_of_part, held_words, paths_of

if TYPE_CHECKING:
    from modicum.tasks.text_classes import TextClasses

# Fields of a recipe's data that say nothing of labelled texts.
_UNREAD = (
    *("sources", "format", "column", "prompt_column", "chat_template", "train_on", "boundaries"),
)


@dataclass(frozen=True)
class LabelledTexts:
    """Rows of all parts, in the order in which they were read, and the names of their classes.

    Args:
        labels: the number of each row's class.
        flags: the part of each row, as a place in `PARTS`.
        digest: SHA-256 of all that decides the rows.
        title: of the training data.
        others: titles of the data of their own that other parts have.
        files: that they were read from.
    """

    rows: tuple[LabelledText, ...]
    labels: tuple[int, ...]
    flags: bytes
    names: tuple[str, ...]
    digest: str
    title: str
    others: Mapping[str, str]
    files: tuple[Path, ...] = ()

    @property
    def described(self) -> str:
        """One phrase for people: what was read, and how many texts are trained and evaluated."""
        counts = {part: self.flags.count(flag) for flag, part in enumerate(PARTS)}
        own = sum(count for part, count in counts.items() if part not in self.others)
        kept = held_words(counts, {part: f"{it}," for part, it in self.others.items()}, "texts")
        return f"{self.title}, {own:,} texts of {len(self.names)} classes{kept}"

    def counts(self) -> dict[str, Any]:
        """How many rows are trained, and how many of them each class has."""
        own = Counter(
            label for label, flag in zip(self.labels, self.flags, strict=True) if not flag
        )
        classes = {name: own[number] for number, name in enumerate(self.names)}
        return {"rows": sum(classes.values()), "classes": classes}


def labelled_texts(recipe: Recipe, asked: TextClasses) -> LabelledTexts:
    """Read all rows of a recipe's data.

    Raises:
        InputError: with the recipe's field, or the file and line at fault.
    """
    data = recipe.data
    check_data(recipe)
    source = _opened(recipe, asked, data.path, "data.path")
    others = {
        part: _opened(recipe, asked, path, field_of_part(data, part))
        for part, path in paths_of(data).items()
    }
    check_files_apart({"data.path": source}, others)
    rows = _rows(source, asked, "data.path")
    try:
        names = class_names(rows, asked.classes)
        labels = [numbered(row, names, listed=bool(asked.classes)) for row in rows]
    except InputError as error:
        raise error.located(field="task.label_column") from None
    # Words that are integers were sorted as words once, and their classes had other numbers.
    words = not asked.classes and any(isinstance(row.label, str) for row in rows)
    renumbered = [list(names)] if words and list(names) != sorted(names) else []
    draw = draw_of(data, recipe.training.seed)
    try:
        flags = draw.flags_by_class(labels, [" ".join(row.texts) for row in rows])
    except InputError as error:
        raise error.within("data") from None
    for part, other in others.items():
        more = _rows(other, asked, field_of_part(data, part))
        try:
            labels += [numbered(row, names, listed=bool(asked.classes)) for row in more]
        except InputError as error:
            raise error.located(field=field_of_part(data, part)) from None
        rows += more
        flags += bytes([PARTS.index(part)]) * len(more)
    sources = {TRAIN: source} | others
    how: list[Any] = [
        [each.fingerprint() for each in sources.values()],
        asked.model_dump(mode="json"),
        data.sequence_length,
        data.too_long,
        # A part that is not there is not named: without a test all is as before there were any.
        *(
            [n for n, flag in enumerate(flags) if flag == place]
            for place in sorted({1, *flags} - {0})
        ),
        *renumbered,
    ]
    digest = hashlib.sha256(json.dumps(how, sort_keys=True).encode()).hexdigest()
    titles = {part: each.describe() for part, each in sources.items()}
    paths = tuple(file.path for each in sources.values() for file in each.files)
    return LabelledTexts(
        tuple(rows), tuple(labels), bytes(flags), names, digest, titles.pop(TRAIN), titles, paths
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


def _opened(recipe: Recipe, asked: TextClasses, path: str | None, field: str) -> Source:
    data = recipe.data
    return open_source(
        path,
        include=data.include,
        exclude=data.exclude,
        column=asked.text_columns[0],
        rows="text",
        limit_bytes=data.limit,
        field=field,
    )


def _rows(source: Source, asked: TextClasses, field: str) -> list[LabelledText]:
    try:
        return list(read_labelled(source, asked.text_columns, asked.label_column))
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
    vocabulary: int,
) -> Data[TextClassBatch]:
    """Tokenize all rows once, by rank 0, into the run folder, and map what it wrote.

    Args:
        buckets: whether the rows of one update are of similar length.
        vocabulary: of the model: token ids are below it.

    Raises:
        InputError: a row is too long and the recipe refuses that, or has a token that is beyond the
            model's vocabulary; or nothing is left.
    """
    target, own = folder / "data", folder / "tokenizer"
    made_from = [texts.digest, {file.name: file_digest(file) for file in tokenizer.files}]

    def work() -> None:
        if not ranks.first:
            return
        known = read_json(target / COUNTS) if (target / COUNTS).is_file() else {}
        if known.get("made_from") == made_from:
            if not all((own / file.name).is_file() for file in tokenizer.files):
                _copy_anew(tokenizer.files, own)
            return
        progress("tokenizing", 0, len(texts.rows))
        rows, counts = _encoded(recipe, texts, tokenizer, vocabulary)
        _copy_anew(tokenizer.files, own)
        # Last, since with the rows the data counts as prepared.
        write_rows(target, rows, {**counts, "made_from": made_from})

    ranks.first_alone(work, lambda: progress("tokenizing", 0, None))
    counts = {key: n for key, n in read_json(target / COUNTS).items() if key != "made_from"}
    train = read_side(target, TRAIN, padding)
    if train is None:
        raise InputError("no row is left to train on", field="data.path", value=recipe.data.path)
    numbers = train.labels.bincount(minlength=len(texts.names)).tolist()
    training = recipe.training
    return Data(
        train=train,
        validation=read_side(target, VALIDATION, padding),
        test=read_side(target, TEST, padding),
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


def _copy_anew(files: Sequence[Path], folder: Path) -> None:
    """Make a folder of copies atomically; files that are linked to those of an old one stay."""
    with publish_folder(folder) as temporary:
        for file in files:
            shutil.copyfile(file, temporary / file.name)


def _encoded(
    recipe: Recipe, texts: LabelledTexts, tokenizer: PairTokenizer, vocabulary: int
) -> tuple[dict[str, list[EncodedRow]], dict[str, int]]:
    """The rows of each part that are kept, and what became of the others.

    Rows to train on are in the order of the data, of other parts in one that mixes the classes.
    """
    room, policy = recipe.data.sequence_length, recipe.data.too_long
    found = tokenizer.encode([row.texts for row in texts.rows], room)
    kept: list[tuple[int, EncodedRow]] = []
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
            if (worst := max(ids)) >= vocabulary:
                word, where = tokenizer.inner.id_to_token(worst), texts.rows[place].origin
                asked = recipe.data.tokenizer
                raise beyond(worst, word, where, vocabulary).located(
                    field="model.path" if asked is None else "data.tokenizer"
                )
            counts["truncated"] += truncated
            kept.append((place, EncodedRow(ids, types, texts.labels[place])))

    def mixing(pair: tuple[int, EncodedRow]) -> bytes:
        return order_key(" ".join(texts.rows[pair[0]].texts))

    # A test is written where there is one.
    sides: dict[str, list[EncodedRow]] = {}
    for flag in sorted({0, 1, *texts.flags}):
        own = [pair for pair in kept if texts.flags[pair[0]] == flag]
        sides[PARTS[flag]] = [row for _, row in (sorted(own, key=mixing) if flag else own)]
    return sides, counts
