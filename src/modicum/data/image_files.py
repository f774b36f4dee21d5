"""Files of images and their labels: a folder with one folder a class, or a table next to images.

Nothing here opens an image; `image_arrays` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from modicum.core.errors import InputError
from modicum.data.parts import PARTS, TEST, TRAIN, VALIDATION, Draw
from modicum.data.row_files import rows_of
from modicum.data.source_files import ROW_SUFFIXES
from modicum.data.unpacking import content_name

SUFFIXES = (".png", ".jpg", ".jpeg")
_FILE, _LABEL = "file", "label"
# What the folders of the parts may be called; torchvision has `val`.
_FOLDERS = {TRAIN: ("train",), VALIDATION: ("validation", "val", "valid", "dev"), TEST: ("test",)}
# Names that classes with folders in them are not taken to have, in large or small letters.
_PARTS = {*PARTS, *_FOLDERS[VALIDATION], "training", "eval", "evaluation", "testing"}
_NOTHING = Draw()


@dataclass(frozen=True)
class LabelledFile:
    """An image on disk.

    Args:
        name: its path within the data, which is what a draw depends on.
        label: the name of its class.
    """

    path: Path
    name: str
    label: str


@dataclass(frozen=True)
class LabelledFiles:
    """Images to train on and to evaluate on, and the classes of the former.

    Args:
        names: of the classes, in order; a label is a place in it.
    """

    train: tuple[LabelledFile, ...]
    validation: tuple[LabelledFile, ...]
    names: tuple[str, ...]
    test: tuple[LabelledFile, ...] = ()

    @property
    def parts(self) -> dict[str, tuple[LabelledFile, ...]]:
        """The images of each part; a test is there where it has any."""
        parts = {TRAIN: self.train, VALIDATION: self.validation}
        return parts | ({TEST: self.test} if self.test else {})

    def counts(self) -> dict[str, dict[str, int]]:
        """Of each part, how many images each class has."""
        found = {}
        for part, files in self.parts.items():
            each = Counter(file.label for file in files)
            found[part] = {name: each[name] for name in self.names}
        return found


def class_words(counts: Mapping[str, int], most: int = 8) -> str:
    """How many images each class has, for people; of many classes the rarest and the commonest.

    >>> class_words({"cats": 1200, "dogs": 3})
    'cats 1,200, dogs 3'
    >>> class_words({f"{n}": n for n in range(1, 40)})
    '39 classes, from 1 (1) to 39 (39)'
    """
    if len(counts) <= most:
        return ", ".join(f"{name} {count:,}" for name, count in counts.items())
    (rare, least), *_, (common, largest) = sorted(counts.items(), key=lambda pair: pair[1])
    return f"{len(counts)} classes, from {least:,} ({rare}) to {largest:,} ({common})"


def find_images(
    path: Path, others: Mapping[str, Path] | None = None, draw: Draw = _NOTHING
) -> LabelledFiles:
    """The images that a path names, and those that are held out.

    Held out are those of `others`, else of the folders `validation` and `test` next to `train`,
    else what is drawn of each class, by the files' names.

    Args:
        path: a folder with one folder a class, or with `train` and `validation` or `test` of such
            folders, of which the validation may be called `val`, `valid` or `dev`; or a table with
            the columns file (as seen from the table) and label.
        others: of `validation` and `test`, those that are elsewhere.

    Raises:
        InputError: nothing is there, an image has no class, a class no image, or what is held out
            has a class that training has not.
    """
    others = dict(others or {})
    if sides := _sides(path):
        path = sides.pop(TRAIN)
        others = sides | others
    draw = draw.without(others)
    train = _labelled(path)
    names = _ordered({file.label for file in train})
    _check_names(names, path)
    if len(names) < 2:
        raise InputError(
            "all images are of one class, and a classifier tells apart at least two",
            file=path,
            value=names[0],
        )
    flags = draw.flags_by_class([file.label for file in train], [file.name for file in train])
    found = {
        part: tuple(file for file, flag in zip(train, flags, strict=True) if flag == place)
        for place, part in enumerate(PARTS)
    }
    for part, other in others.items():
        found[part] = tuple(_labelled(other))
        strange = next((file for file in found[part] if file.label not in names), None)
        if strange is not None:
            raise InputError(
                f"this class of the {part} has no image to train on",
                file=strange.path,
                value=strange.label,
                allowed=", ".join(names),
                candidates=names,
            )
    return LabelledFiles(**found, names=names)


def _sides(path: Path) -> dict[str, Path]:
    """The folders of the parts, where a folder has one to train on and another; else none.

    Raises:
        InputError: other folders are next to them.
    """
    folders = [each for each in _visible(path) if each.is_dir()] if path.is_dir() else []
    there = {folder.name: folder for folder in folders}
    sides: dict[str, Path] = {}
    for part, names in _FOLDERS.items():
        folder = next((there[name] for name in names if name in there), None)
        if folder is not None:
            sides[part] = folder
    if TRAIN not in sides or len(sides) == 1:
        return {}
    more = [folder for folder in folders if folder not in sides.values()]
    if more:
        known = " and ".join([folder.name for folder in sides.values()][:2])
        raise InputError(
            f"a folder stands next to {known}, so it is not known whether these are classes; move "
            "it away",
            file=more[0],
        )
    return sides


def _check_names(names: Sequence[str], path: Path) -> None:
    """Refuse classes whose names are no text: those of folders may be any bytes.

    Raises:
        InputError: one is.
    """
    for name in names:
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise InputError(
                "the name of this class is not UTF-8, so it cannot be shown; rename it",
                file=path,
                value=name,
            )


def _labelled(path: Path) -> list[LabelledFile]:
    if path.is_dir():
        return list(_of_folders(path))
    if not path.exists():
        raise InputError("there is no such folder or table of images", file=path)
    return list(_of_table(path))


def _of_folders(root: Path) -> Iterator[LabelledFile]:
    there = _visible(root)
    loose = next((each for each in there if each.suffix.lower() in SUFFIXES), None)
    if loose is not None:
        raise InputError(
            "this image has no class: put it into the folder of its class, or name a table with "
            f"the columns {_FILE} and {_LABEL}",
            file=loose,
        )
    classes = [each for each in there if each.is_dir()]
    if not classes:
        raise InputError(
            "holds no folders of classes; give one folder a class, as in cats/1.png, or a table "
            f"with the columns {_FILE} and {_LABEL}",
            file=root,
        )
    for folder in classes:
        if _is_part(folder):
            raise InputError(
                "has the name of a part of the data, and folders in it, so it is no class; call "
                f"the parts {TRAIN}, {VALIDATION} and {TEST}, or name this folder as the data",
                file=folder,
            )
        files = [file for file in _below(folder, set()) if file.suffix.lower() in SUFFIXES]
        if not files:
            raise InputError(
                f"this class has no image ({', '.join(SUFFIXES)}); remove its folder", file=folder
            )
        for file in files:
            yield LabelledFile(file, file.relative_to(root).as_posix(), folder.name)


def _is_part(folder: Path) -> bool:
    """Whether a folder is called as parts of data are, and all in it is in folders of its own."""
    if folder.name.lower() not in _PARTS:
        return False
    inside = _visible(folder)
    loose = any(each.suffix.lower() in SUFFIXES for each in inside)
    return not loose and any(each.is_dir() for each in inside)


def _of_table(table: Path) -> Iterator[LabelledFile]:
    kind = ROW_SUFFIXES.get(content_name(table).suffix.lower())
    if kind is None:
        raise InputError(
            "is neither a folder nor a table of images",
            file=table,
            allowed=f"a folder of classes; .csv, .jsonl and the like with {_FILE} and {_LABEL}",
        )
    found = False
    for number, columns, _ in rows_of(table, kind):
        values = {}
        for column in (_FILE, _LABEL):
            if columns.get(column) in (None, ""):
                raise InputError(
                    "the row has no such column, or nothing in it",
                    file=table,
                    line=number,
                    field=column,
                    allowed="the columns that it has: " + ", ".join(map(repr, columns)),
                    candidates=columns,
                    word=column,
                )
            values[column] = str(columns[column])
        file = table.parent / values[_FILE]
        if file.suffix.lower() not in SUFFIXES or not file.is_file():
            problem = "there is no such image" if file.suffix.lower() in SUFFIXES else "is no image"
            raise InputError(
                problem, file=table, line=number, field=_FILE, value=values[_FILE],
                allowed=", ".join(SUFFIXES),
            )  # fmt: skip
        found = True
        yield LabelledFile(file, values[_FILE], values[_LABEL])
    if not found:
        raise InputError("the table has no rows", file=table)


def _ordered(labels: set[str]) -> tuple[str, ...]:
    """By name, numbers by value."""
    if all(label.isascii() and label.isdigit() for label in labels):
        return tuple(sorted(labels, key=lambda label: (int(label), label)))
    return tuple(sorted(labels))


def _visible(folder: Path) -> list[Path]:
    """What is in a folder, by name; names that begin with a dot are left out."""
    try:
        return sorted(each for each in folder.iterdir() if not each.name.startswith("."))
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=folder) from error


def _below(folder: Path, seen: set[Path]) -> Iterator[Path]:
    """The files in a folder, and in those in it.

    Args:
        seen: takes the places of the folders.

    Raises:
        InputError: a link leads to one of them again, as from a folder to itself.
    """
    if (place := folder.resolve()) in seen:
        problem = "by a link this is a folder whose images are there already; remove the link"
        raise InputError(problem, file=folder)
    seen.add(place)
    for each in _visible(folder):
        if each.is_dir():
            yield from _below(each, seen)
        else:
            yield each
