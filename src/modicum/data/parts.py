"""The parts of a data set, and which documents are held out of what is trained.

Text, streams, labelled texts and images all draw here, so that none of them has a rule of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass

from modicum.core.errors import InputError

PARTS = TRAIN, VALIDATION, TEST = ("train", "validation", "test")
HELD = (VALIDATION, TEST)


@dataclass(frozen=True)
class Draw:
    """The fractions of the documents that are held out, and which documents those are.

    The test is drawn first, by the documents' numbers or names alone: it is the same with any seed,
    so what one run of a study is tested on no other trains on. The validation is drawn from what is
    left, by `seed` too. So neither its fraction nor the seed moves a document into or out of the
    test, and without a test it is what it would be alone.

    Args:
        validation: of the documents that are not in the test.
        test: of all documents.
        seed: of the validation.

    >>> list(Draw(0.3).flags(8)), list(Draw(0.3, test=0.2).flags(8))
    ([0, 0, 0, 1, 0, 0, 0, 0], [0, 0, 0, 1, 2, 0, 0, 0])
    """

    validation: float = 0.0
    test: float = 0.0
    seed: int = 0

    @property
    def trained(self) -> float:
        """The fraction of the documents that is trained, about."""
        return (1 - self.test) * (1 - self.validation)

    @property
    def drawn(self) -> list[tuple[str, float]]:
        """The parts that are drawn, in the order in which that is done, and their fractions."""
        fractions = ((TEST, self.test), (VALIDATION, self.validation))
        return [(part, fraction) for part, fraction in fractions if fraction]

    def without(self, parts: Collection[str]) -> Draw:
        """The same, but of parts that have data of their own nothing is drawn."""
        left = {part: 0.0 if part in parts else own for part, own in self.drawn}
        return Draw(left.get(VALIDATION, 0.0), left.get(TEST, 0.0), self.seed)

    def part_of(self, name: int | str) -> str:
        """The part of one document of very many, whatever the others are."""
        for part, fraction in self.drawn:
            if self._chance(part, name) < int(fraction * 2**64):
                return part
        return TRAIN

    def flags(self, documents: int) -> bytearray:
        """The part of each document by its number, as a place in `PARTS`.

        At least one falls on each part that is drawn and on the training, the likeliest where none
        did.

        Raises:
            InputError: there are too few documents for that.
        """
        flags, drawn = bytearray(documents), self.drawn
        if drawn and documents <= len(drawn):
            raise _too_few(documents, *drawn[-1])
        for later, (part, fraction) in zip(reversed(range(len(drawn))), drawn, strict=True):
            place, bar = PARTS.index(part), int(fraction * 2**64)

            def chance(number: int, part: str = part) -> int:
                return self._chance(part, number)

            chosen = [n for n in range(documents) if not flags[n] and chance(n) < bar]
            most = flags.count(0) - later - 1
            if len(chosen) > most:
                chosen = sorted(chosen, key=chance)[:most]
            for number in chosen or [min(_free(flags), key=chance)]:
                flags[number] = place
        return flags

    def flags_by_class(self, labels: Sequence[Hashable], names: Sequence[str]) -> bytearray:
        """The part of each row, as a place in `PARTS`: the fractions of each class.

        Every class keeps a row to train on.

        Args:
            labels: the class of each row.
            names: what each row is known by; its chance depends on that.

        Raises:
            InputError: a part is drawn, and no class has enough rows for it.
        """
        flags = bytearray(len(labels))
        for part, fraction in self.drawn:
            classes: dict[Hashable, list[int]] = {}
            for number in _free(flags):
                classes.setdefault(labels[number], []).append(number)
            held = []
            for own in classes.values():
                own.sort(key=lambda number: self._digest(part, names[number]))
                held += own[: min(round(fraction * len(own)), len(own) - 1)]
            if not held:
                raise InputError(
                    "no class has so many that one is held out; raise it, or set it to 0",
                    field=f"{part}_fraction",
                    value=fraction,
                )
            for number in held:
                flags[number] = PARTS.index(part)
        return flags

    def _chance(self, part: str, name: int | str) -> int:
        return int.from_bytes(self._digest(part, name)[:8], "little")

    def _digest(self, part: str, name: int | str) -> bytes:
        seed = f"{self.seed}/" if part == VALIDATION else ""
        return _hashed(f"{seed}{part}/{name}")


def order_key(name: str) -> bytes:
    """What labelled rows that are held out are sorted by: the first ones are a mixture of all.

    Files are often sorted by class, and an evaluation may look at the first rows alone. It depends
    on nothing but what a row is known by.
    """
    return _hashed(f"order/{name}")


def _hashed(text: str) -> bytes:
    # Python spells bytes in names of files that are no UTF-8 as halves of surrogate pairs.
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def _free(flags: bytearray) -> Iterator[int]:
    return (number for number, flag in enumerate(flags) if not flag)


def _too_few(documents: int, part: str, fraction: float) -> InputError:
    few = "is only one document" if documents == 1 else f"are only {documents} documents"
    return InputError(
        f"there {few}, so none can be held out for {part}; set the {part} fraction to 0, name a "
        f"{part} file, or give more documents",
        field=f"data.{part}_fraction",
        value=fraction,
    )
