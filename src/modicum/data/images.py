"""Images with one label each, from data sets that need no download.

`digits` are scikit-learn's 1,797 scans of 8x8 pixels in 17 shades, each pixel drawn as a square of
4x4; nothing is added that a larger scan would have. `textures` are gratings, made when they are
asked for, as a function of seed and index: the class sets direction and colour, the image phase,
wavelength, contrast and noise.
"""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modicum.core.errors import InputError
from modicum.core.random import bits, key, philox
from modicum.data.batch import LabelledRows

SIDE = 32
DIGIT_CLASSES, DIGITS = 10, 1797
_DRAWS = 8  # numbers that an image draws, its noise apart
_NOISE = 2.0


@dataclass(frozen=True)
class ImageBatch(LabelledRows):
    """Images with their labels.

    Args:
        images: float32 [B, channels, height, width], about mean 0 and deviation 1.
        labels: int64 [B], or -100 where none is trained.

    >>> batch = ImageBatch(torch.zeros(2, 1, 4, 4), torch.tensor([1, -100]))
    >>> batch.rows, batch.count
    (2, 1)
    """

    images: Tensor
    labels: Tensor


class Images(ABC):
    """Rows of one image each; subclasses say how many, and make them."""

    def __init__(self, count: int, classes: int, channels: int) -> None:
        self._count, self.classes, self.channels = count, classes, channels

    def __len__(self) -> int:
        return self._count

    def count(self, index: int) -> int:
        """Every image has one label."""
        return 1

    @abstractmethod
    def batch(self, indices: Sequence[int]) -> ImageBatch:
        """The images `indices`, in that order."""

    def worst(self, rows: int) -> ImageBatch:
        """The first images, again where there are fewer: all take as much memory.

        Raises:
            ValueError: no rows are asked for.
        """
        if rows < 1:
            raise ValueError(f"a batch of {rows} rows")
        return self.batch([index % len(self) for index in range(rows)])

    def shapes(self, rows: Iterable[int]) -> list[ImageBatch]:
        """Batches of so many images, the largest first."""
        return [self.worst(size) for size in sorted(set(rows), reverse=True)]


class Stored(Images):
    """Images that are in memory.

    Args:
        images: float32 [n, channels, height, width].
        labels: int64 [n], from 0.
    """

    def __init__(self, images: Tensor, labels: Tensor, classes: int) -> None:
        super().__init__(len(labels), classes, images.shape[1])
        self._images, self._labels = images, labels

    def batch(self, indices: Sequence[int]) -> ImageBatch:
        """The images `indices`, in that order."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        return ImageBatch(self._images[chosen], self._labels[chosen])


class Textures(Images):
    """Gratings of 3 colours on 32x32 pixels, each a function of the seed and of its number.

    Args:
        count: how many there are.
        first: the number of the first one; other numbers are other images.

    >>> data = Textures(100, classes=10, seed=0)
    >>> data.batch([3, 13]).images.shape, data.batch([3, 13]).labels.tolist()
    (torch.Size([2, 3, 32, 32]), [3, 3])
    >>> bool((data.batch([3]).images == Textures(9, 10, 0, first=3).batch([0]).images).all())
    True
    """

    def __init__(self, count: int, classes: int, seed: int, first: int = 0) -> None:
        super().__init__(count, classes, 3)
        self.seed, self.first = seed, first

    def batch(self, indices: Sequence[int]) -> ImageBatch:
        """The images `indices`, in that order."""
        numbers = torch.as_tensor(indices, dtype=torch.int64) + self.first
        labels = numbers % self.classes
        pixels = 3 * SIDE * SIDE
        drawn = self._uniform(numbers, _DRAWS + pixels)
        noise = drawn[:, _DRAWS:].view(-1, 3, SIDE, SIDE) - 0.5
        phase, length, turn, contrast, *tint = drawn[:, :7, None, None, None].unbind(1)
        angle = math.pi * (labels.view(-1, 1, 1, 1) + 0.8 * (turn - 0.5)) / self.classes
        across, down = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="xy")
        along = across * angle.cos() + down * angle.sin()
        waves = torch.sin(2 * math.pi * (along / (4 + 6 * length) + phase))
        # Every class has a colour of its own, which every image distorts.
        own = torch.arange(3) / 3 + labels.view(-1, 1) * 0.37
        colour = torch.sin(2 * math.pi * own).view(-1, 3, 1, 1) + torch.cat(tint, 1) - 0.5
        images = (0.3 + 0.7 * contrast) * waves * (0.6 + 0.4 * colour) + _NOISE * noise
        return ImageBatch(images.float(), labels)

    def _uniform(self, numbers: Tensor, each: int) -> Tensor:
        """`each` numbers of U(0, 1) for every image: float32 [len(numbers), each]."""
        words = -(-each // 4)
        counter = numbers[:, None] * words + torch.arange(words)
        drawn = philox(counter.flatten(), key(self.seed, "textures"))
        return ((drawn.view(len(numbers), -1)[:, :each] >> 8).float() + 0.5) * 2.0**-24


def digits(
    seed: int, held_out: int, tested: int = 0
) -> tuple[Stored, Stored | None, Stored | None]:
    """scikit-learn's digits as 32x32 images of one channel, some of them held out.

    Args:
        held_out: how many to evaluate on; which ones depends on the seed.
        tested: how many are the test: the same ones with any seed.

    Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998 (the
    test set, as scikit-learn ships it).

    Raises:
        InputError: scikit-learn is not installed, or nothing would be left to train on.
    """
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ImportError:
        raise InputError(
            "these images come with scikit-learn, which is not installed; pip install "
            "modicum[proofs], or use textures",
            value="digits",
        ) from None
    if held_out + tested >= DIGITS:
        raise InputError(
            "leaves no images to train on",
            field="held_out",
            value=held_out,
            allowed=f"less than {DIGITS - tested}",
        )
    found = datasets.load_digits()
    small = torch.from_numpy(found.images).float().unsqueeze(1) / 8 - 1
    images = small.repeat_interleave(4, 2).repeat_interleave(4, 3)
    labels = torch.from_numpy(found.target).long()
    test = torch.argsort(bits(len(labels), seed=0, name="digits to test on"), stable=True)[:tested]
    order = torch.argsort(bits(len(labels), seed=seed, name="held-out digits"), stable=True)
    order = order[~torch.isin(order, test)]

    def stored(chosen: Tensor) -> Stored | None:
        if not len(chosen):
            return None
        return Stored(images[chosen], labels[chosen], DIGIT_CLASSES)

    train = stored(order[held_out:])
    assert train is not None
    return train, stored(order[:held_out]), stored(test)
