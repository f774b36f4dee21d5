"""Where the images of a run come from: made as they are asked for, or a user's own files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from modicum.core.errors import InputError
from modicum.core.progress import StageProgress
from modicum.core.ranks.ranks import Ranks
from modicum.data.image_arrays import CARD, ImageArrays, Shaping, read_arrays, write_arrays
from modicum.data.image_files import LabelledFiles, find_images
from modicum.data.images import DIGIT_CLASSES, DIGITS, SIDE, Images, Textures, digits
from modicum.data.parts import TRAIN
from modicum.tasks.parts import draw_of, held_words, paths_of

if TYPE_CHECKING:
    from modicum.tasks.images import ImageClasses


class PreparedImages(NamedTuple):
    """The parts, what a run that resumes must find again, and what is exported with weights."""

    train: Images
    validation: Images | None
    test: Images | None
    identity: Mapping[str, Any]
    files: tuple[Path, ...] = ()


@dataclass(frozen=True)
class MadeImages:
    """Textures, or scikit-learn's digits."""

    asked: ImageClasses
    size: int = SIDE

    @property
    def title(self) -> str:
        """What people call them."""
        return self.asked.data

    @property
    def channels(self) -> int:
        """1 of digits, 3 of textures."""
        return 1 if self.asked.data == "digits" else 3

    @property
    def names(self) -> tuple[str, ...]:
        """Of the classes: their numbers."""
        count = DIGIT_CLASSES if self.asked.data == "digits" else self.asked.classes
        return tuple(map(str, range(count)))

    def check(self, seed: int) -> None:
        """Refuse fields that are of a user's own images.

        Raises:
            InputError: one is set.
        """
        for name in ("validation_path", "test_path", "test_fraction", "size", "fit", "colour"):
            if getattr(self.asked, name) != type(self.asked).model_fields[name].default:
                raise InputError(
                    f"is of your own images (data_path), and {self.title} are made with "
                    f"{SIDE}x{SIDE} pixels; leave it out",
                    field=name,
                    value=getattr(self.asked, name),
                )

    def described(self, seed: int) -> str:
        """One phrase for people."""
        asked = self.asked
        count = asked.images + asked.held_out + asked.tested
        count = DIGITS if asked.data == "digits" else count
        return f"{count} {self.title} of {SIDE}x{SIDE} pixels"

    def counts(self, seed: int) -> dict[str, Any]:
        """How many are trained."""
        asked = self.asked
        left = DIGITS - asked.held_out - asked.tested if asked.data == "digits" else asked.images
        return {"rows": max(left, 0)}

    def rows(self, seed: int) -> tuple[Images, Images | None, Images | None]:
        """The parts: training, validation and test."""
        asked = self.asked
        if asked.data == "digits":
            return digits(seed, asked.held_out, asked.tested)
        train = Textures(asked.images, asked.classes, seed)
        # The test comes first, so that another number of images to evaluate on leaves it as it is.
        first = asked.images + asked.tested
        held = Textures(asked.held_out, asked.classes, seed, first)
        test = Textures(asked.tested, asked.classes, seed, asked.images)
        return train, held if asked.held_out else None, test if asked.tested else None

    def prepared(
        self, seed: int, folder: Path, progress: StageProgress, ranks: Ranks
    ) -> PreparedImages:
        """Nothing is written: every rank makes its own."""
        what = {"data", "classes", "images", "held_out", *(["tested"] if self.asked.tested else [])}
        identity = {"images": self.asked.model_dump(include=what), "seed": seed}
        return PreparedImages(*self.rows(seed), identity)


@dataclass(frozen=True)
class OwnImages:
    """A user's images, in folders or by a table."""

    asked: ImageClasses
    _found: dict[int, LabelledFiles] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """What people call them."""
        return str(self.asked.data_path)

    @cached_property
    def shaping(self) -> Shaping:
        """How they become arrays."""
        return Shaping(self.asked.size, self.asked.fit, self.asked.colour)

    @property
    def size(self) -> int:
        """Pixels of height and width."""
        return self.asked.size

    @property
    def channels(self) -> int:
        """3, or 1 of grey ones."""
        return self.shaping.channels

    @property
    def names(self) -> tuple[str, ...]:
        """Of the classes, by name."""
        return (next(iter(self._found.values()), None) or self.files(0)).names

    def files(self, seed: int) -> LabelledFiles:
        """All files with their labels, listed once.

        Raises:
            InputError: as `find_images`.
        """
        if seed not in self._found:
            asked = self.asked
            others = {part: Path(path) for part, path in paths_of(asked).items()}
            self._found[seed] = find_images(Path(self.title), others, draw_of(asked, seed))
        return self._found[seed]

    def check(self, seed: int) -> None:
        """List all files, and read the first image.

        Raises:
            InputError: as `find_images` and `Shaping.array`.
        """
        self.shaping.array(self.files(seed).train[0].path)

    def described(self, seed: int) -> str:
        """One phrase for people."""
        files, size, others = self.files(seed), self.size, paths_of(self.asked)
        counts = {part: len(own) for part, own in files.parts.items()}
        own = sum(count for part, count in counts.items() if part not in others)
        shape = f"images of {len(files.names)} classes, as {size}x{size}"
        kept = held_words(counts, {part: f"{path}:" for part, path in others.items()}, "images")
        return f"{self.title}: {own:,} {shape}{kept}"

    def counts(self, seed: int) -> dict[str, Any]:
        """How many are trained, and how many each class has."""
        files = self.files(seed)
        return {"rows": len(files.train), "classes": files.counts()[TRAIN]}

    def prepared(
        self, seed: int, folder: Path, progress: StageProgress, ranks: Ranks
    ) -> PreparedImages:
        """Arrays in the run folder: rank 0 writes them, and each rank maps its part."""

        def work() -> ImageArrays:
            target = folder / "data"
            if ranks.first:
                write_arrays(
                    self.files(seed), self.shaping, target,
                    lambda done, total: progress("reading images", done, total),
                )  # fmt: skip
            return read_arrays(target)

        found = ranks.first_alone(work, lambda: progress("reading images", 0, None))
        card = folder / "data" / CARD
        identity = {"made_from": found.digest}
        return PreparedImages(found.train, found.validation, found.test, identity, (card,))


def origin_of(asked: ImageClasses) -> MadeImages | OwnImages:
    """Where the images come from that a recipe asks for."""
    return MadeImages(asked) if asked.data_path is None else OwnImages(asked)


@contextmanager
def within_task() -> Iterator[None]:
    """Errors in the block about a field name it in the recipe's section; others, the data."""
    try:
        yield
    except InputError as error:
        if error.field is None:
            raise error.located(field="task.data_path") from None
        if error.file is not None:  # the column of a table
            raise
        raise error.within("task") from None
