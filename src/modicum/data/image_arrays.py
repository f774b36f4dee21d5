"""Images out of PNG and JPEG files, all of one size: decoded once, kept as arrays, then mapped.

The folder holds `pixels.bin` (uint8 [images, channels, size, size], those to train on first),
`labels.bin` (int64), `images.json` (the classes, and how images become arrays) and `manifest.json`,
with the digests of these and of all that they were made from. It appears by one rename.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from modicum.core.errors import InputError
from modicum.core.extras import library
from modicum.core.files import file_digest, publish_folder, regular, write_json
from modicum.core.progress import CountProgress
from modicum.data.image_files import LabelledFile, LabelledFiles
from modicum.data.images import ImageBatch, Images
from modicum.data.parts import TRAIN, order_key

Fit = Literal["crop", "stretch", "pad"]
Colour = Literal["rgb", "grey"]
# What says, next to exported weights, which classes there are and how images become arrays.
CARD = "images.json"
_PIXELS, _LABELS, _MANIFEST = "pixels.bin", "labels.bin", "manifest.json"
_FORMAT, _AT_ONCE = 1, 256
# Of images with more pixels one is decoded at a time: a small file can hold 179 million of them,
# the most that Pillow opens, which take some bytes each.
_LARGE, _in_turn = 1 << 25, threading.Lock()
_WIDE = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")  # more than 8 bits a channel
# Bytes become (byte - 127.5) / 64, which for photographs is about mean 0 and deviation 1.
MIDDLE, DEVIATION = 127.5, 64.0


@dataclass(frozen=True)
class Shaping:
    """How images of any size become arrays of one.

    Args:
        size: pixels of height and of width.
        fit: crop: the shorter side is made to fit and the middle taken. stretch: both sides are
            made to fit. pad: the longer side is, and what is missing is black.
        colour: rgb: three channels; grey: one.
    """

    size: int = 32
    fit: Fit = "crop"
    colour: Colour = "rgb"

    @property
    def channels(self) -> int:
        """3 or 1."""
        return 3 if self.colour == "rgb" else 1

    def array(self, path: Path) -> bytes:
        """The pixels of a file, [channels, size, size].

        Cameras' rotation is undone, and what is transparent becomes white.

        Raises:
            InputError: it is no PNG or JPEG, damaged, or has more than 8 bits a channel; or Pillow
                is not installed.
        """
        pillow = library("PIL.Image", "images", "reading images")
        operations = library("PIL.ImageOps", "images", "reading images")
        try:
            with pillow.open(path, formats=("PNG", "JPEG")) as opened:
                if opened.mode in _WIDE:
                    raise InputError(
                        "has more than 8 bits a channel; save it with 8, which is what is read",
                        file=path,
                    )
                large = opened.width * opened.height > _LARGE
                turn: AbstractContextManager[Any] = _in_turn if large else nullcontext()
                with turn:
                    image = self._fitted(pillow, operations, opened)
                bands = [band.tobytes() for band in image.split()]
        except InputError:
            raise
        except Exception as error:  # a damaged file may make the decoder raise anything
            said = str(error) or type(error).__name__
            raise InputError(f"is no PNG or JPEG, or is damaged: {said}", file=path) from error
        return b"".join(bands)

    def _fitted(self, pillow: Any, operations: Any, opened: Any) -> Any:
        image = self._coloured(pillow, operations.exif_transpose(opened))
        sides = (self.size, self.size)
        if self.fit == "crop":
            return operations.fit(image, sides, pillow.Resampling.BILINEAR)
        if self.fit == "pad":
            return operations.pad(image, sides, pillow.Resampling.BILINEAR)
        return image.resize(sides, pillow.Resampling.BILINEAR)

    def _coloured(self, pillow: Any, image: Any) -> Any:
        if image.has_transparency_data:
            behind = pillow.new("RGBA", image.size, "white")
            image = pillow.alpha_composite(behind, image.convert("RGBA"))
        return image.convert("RGB" if self.colour == "rgb" else "L")


class ArrayImages(Images):
    """Images of a folder of arrays, mapped and not read.

    Args:
        pixels: uint8 [n, channels, size, size].
        labels: int64 [n].
    """

    def __init__(self, pixels: Tensor, labels: Tensor, classes: int) -> None:
        super().__init__(len(labels), classes, pixels.shape[1])
        self._pixels, self._labels = pixels, labels

    def batch(self, indices: Sequence[int]) -> ImageBatch:
        """The images `indices`, in that order, about mean 0 and deviation 1."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        pixels = (self._pixels[chosen].float() - MIDDLE) / DEVIATION
        return ImageBatch(pixels, self._labels[chosen])


@dataclass(frozen=True)
class ImageArrays:
    """The parts of a folder of arrays; `digest` is of all that they were made from."""

    train: ArrayImages
    validation: ArrayImages | None
    test: ArrayImages | None
    digest: str


def write_arrays(
    files: LabelledFiles, shaping: Shaping, folder: Path, progress: CountProgress | None = None
) -> None:
    """Decode all images into `folder`, or find that this was done before.

    Raises:
        InputError: an image cannot be read, with its name; the disk is full.
    """
    every = [file for part in files.parts.values() for file in part]
    made_from = {
        "format": _FORMAT,
        "shaping": vars(shaping),
        "names": list(files.names),
        "sides": [len(part) for part in files.parts.values()],
        "files": _fingerprint(every),
    }
    if _is_made_from(folder, made_from):
        return
    ordered = _ordered(files)
    with publish_folder(folder) as temporary:
        with open(temporary / _PIXELS, "wb") as handle:
            for done, pixels in enumerate(_decoded(ordered, shaping), start=1):
                handle.write(pixels)
                if progress is not None and done % _AT_ONCE == 0:
                    progress(done, len(every))
        number = {name: place for place, name in enumerate(files.names)}
        labels = torch.tensor([number[file.label] for file in ordered])
        labels.numpy().tofile(temporary / _LABELS)
        card = {"classes": files.names, **vars(shaping), "middle": MIDDLE, "deviation": DEVIATION}
        write_json(temporary / CARD, card)
        digests = {name: file_digest(temporary / name) for name in (_PIXELS, _LABELS, CARD)}
        write_json(temporary / _MANIFEST, {"made_from": made_from, "files": digests})
    if progress is not None:
        progress(len(every), len(every))


def read_arrays(folder: Path) -> ImageArrays:
    """The arrays that `write_arrays` has left in a folder."""
    made_from = json.loads((folder / _MANIFEST).read_bytes())["made_from"]
    shaping, names = Shaping(**made_from["shaping"]), made_from["names"]
    sizes = made_from["sides"]
    shape = (sum(sizes), shaping.channels, shaping.size, shaping.size)
    count = shape[0] * shape[1] * shape[2] * shape[3]
    file = str(folder / _PIXELS)
    pixels = torch.from_file(file, shared=False, size=count, dtype=torch.uint8).view(shape)
    labels = torch.from_file(
        str(folder / _LABELS), shared=False, size=sum(sizes), dtype=torch.int64
    )
    train, validation, test, *_ = [
        ArrayImages(*part, len(names)) if len(part[1]) else None
        for part in zip(pixels.split(sizes), labels.split(sizes), strict=True)
    ] + [None]
    assert train is not None
    digest = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
    return ImageArrays(train, validation, test, digest)


def _ordered(files: LabelledFiles) -> list[LabelledFile]:
    """All images as the arrays have them: of parts that are held out, a mixture of the classes.

    Arrays of earlier versions have them in the order of the files, and so their runs resume.
    """
    found: list[LabelledFile] = []
    for part, own in files.parts.items():
        found += own if part == TRAIN else sorted(own, key=lambda file: order_key(file.name))
    return found


def _decoded(files: Sequence[LabelledFile], shaping: Shaping) -> Iterator[bytes]:
    """The pixels of each file in order; some at a time, on several threads."""
    with ThreadPoolExecutor() as threads:
        for start in range(0, len(files), _AT_ONCE):
            paths = [file.path for file in files[start : start + _AT_ONCE]]
            yield from threads.map(shaping.array, paths)


def _fingerprint(files: Sequence[LabelledFile]) -> str:
    """SHA-256, in hexadecimal, of all names, labels and contents."""
    found = hashlib.sha256()
    for file in files:
        try:
            digest = file_digest(file.path)
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror}", file=file.path) from error
        found.update(json.dumps([file.name, file.label, digest]).encode())
    return found.hexdigest()


def _is_made_from(folder: Path, made_from: dict[str, Any]) -> bool:
    """Whether the arrays are complete and were made from just this."""
    try:
        manifest = json.loads(regular(folder / _MANIFEST).read_bytes())
        files = manifest["files"].items()
        return manifest["made_from"] == made_from and all(
            file_digest(folder / name) == digest for name, digest in files
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # absent, truncated or overwritten: to be made again
