"""The documents of a stream, one after the other, epoch after epoch, from any place on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from modicum.core.random import bits
from modicum.data.readers import Document, Unmade
from modicum.data.sources import Source


class Place(NamedTuple):
    """Where in a stream a document begins.

    Args:
        epoch: how often the data was gone through before.
        file: which of the files, in the epoch's order.
        row: how many documents of that file come before.
        bytes: how many were read in this epoch.
        hub: of a data set of the hub, what `datasets` calls its state there; None at its beginning.
    """

    epoch: int = 0
    file: int = 0
    row: int = 0
    bytes: int = 0
    hub: dict[str, Any] | None = None


@dataclass(frozen=True)
class StreamReader:
    """What is read of a source and in which order: a function of these, whoever reads.

    Args:
        source: where the documents are.
        seed: of the order of files, and of what is held out.
        shuffle: whether files come in a new order each epoch; with a limit they do not.
        held_fraction: the part of the documents that is never trained on.
    """

    source: Source
    seed: int = 0
    shuffle: bool = False
    held_fraction: float = 0.0

    def trained(self, place: Place) -> Iterator[tuple[Place, Unmade]]:
        """The documents to train on from a place to the end of its epoch, and the place after each.

        Raises:
            InputError: a file cannot be read as what it is, with file and line.
        """
        return ((after, each) for after, held, each in self._all(place) if not held)

    def held_out(self) -> Iterator[Document]:
        """The documents of the data that are held out and not blank, as they are asked for.

        Raises:
            InputError: as `trained`.
        """
        held = (each.make() for _, held, each in self._all(Place()) if held)
        return (document for document in held if not document.blank)

    def is_held(self, file: int, row: int) -> bool:
        """Whether a document is held out: a function of the seed and of its number alone."""
        if not self.held_fraction:
            return False
        # Of the first file as `store.held_out` has it, so that one file is held out alike.
        number = f"{row}" if file == 0 else f"{file}/{row}"
        digest = hashlib.sha256(f"{self.seed}/validation/{number}".encode()).digest()
        return int.from_bytes(digest[:8], "little") < int(self.held_fraction * 2**64)

    def files(self, epoch: int) -> list[int]:
        """The files in the order of an epoch."""
        count = self.source.parts
        if not self.shuffle or self.source.limit_bytes is not None:
            return list(range(count))
        words = bits(count, seed=self.seed, name="order of files", step=epoch)
        return [int(number) for number in torch.argsort(words, stable=True)]

    def _all(self, place: Place) -> Iterator[tuple[Place, bool, Unmade]]:
        order, done, limit = self.files(place.epoch), place.bytes, self.source.limit_bytes
        for at in range(place.file, len(order)):
            here = place if at == place.file else Place()
            documents = self.source.read(order[at], here.row, here.hub)
            for row, unmade in enumerate(documents, here.row):
                done += unmade.size
                if limit is not None and done > limit:
                    return
                held = self.is_held(order[at], row)
                yield Place(place.epoch, at, row + 1, done), held, unmade
