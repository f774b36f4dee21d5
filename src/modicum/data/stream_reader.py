"""The documents of a stream, one after the other, epoch after epoch, from any place on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from modicum.core.random import bits
from modicum.data.parts import TRAIN, Draw
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
        seed: of the order of files.
        shuffle: whether files come in a new order each epoch; with a limit they do not.
        draw: the documents that are never trained on.
    """

    source: Source
    seed: int = 0
    shuffle: bool = False
    draw: Draw = field(default_factory=Draw)

    def trained(self, place: Place) -> Iterator[tuple[Place, Unmade]]:
        """The documents to train on from a place to the end of its epoch, and the place after each.

        Raises:
            InputError: a file cannot be read as what it is, with file and line.
        """
        return ((after, each) for after, part, each in self._all(place) if part == TRAIN)

    def held_out(self, part: str) -> Iterator[Document]:
        """The documents of the data that are in `part` and not blank, as they are asked for.

        Raises:
            InputError: as `trained`.
        """
        held = (each.make() for _, own, each in self._all(Place()) if own == part)
        return (document for document in held if not document.blank)

    def part_of(self, file: int, row: int) -> str:
        """The part that a document is in, by its number alone."""
        # Of the first file as `store.prepare` has it, so one file without blank documents is drawn
        # alike. Blank ones have no number there; here a row that is passed by is not looked into.
        return self.draw.part_of(row if file == 0 else f"{file}/{row}")

    def files(self, epoch: int) -> list[int]:
        """The files in the order of an epoch."""
        count = self.source.parts
        if not self.shuffle or self.source.limit_bytes is not None:
            return list(range(count))
        words = bits(count, seed=self.seed, name="order of files", step=epoch)
        return [int(number) for number in torch.argsort(words, stable=True)]

    def _all(self, place: Place) -> Iterator[tuple[Place, str, Unmade]]:
        order, done, limit = self.files(place.epoch), place.bytes, self.source.limit_bytes
        for at in range(place.file, len(order)):
            here = place if at == place.file else Place()
            documents = self.source.read(order[at], here.row, here.hub)
            for row, unmade in enumerate(documents, here.row):
                done += unmade.size
                if limit is not None and done > limit:
                    return
                part = self.part_of(order[at], row)
                yield Place(place.epoch, at, row + 1, done), part, unmade
