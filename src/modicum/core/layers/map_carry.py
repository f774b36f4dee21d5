"""The map of a model, from that of the model with a few blocks of each kind: by names.

Whatever a map says it says in names of tensors and modules, so a finding about a block holds of
each block like it under that block's name, and what it says of the blocks next to it under theirs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar

from modicum.core.layers.block_kinds import BlockList
from modicum.core.layers.map_parts import MappedConvolution, MappedSlice, ModelMap, Units

T = TypeVar("T")
_NUMBERED = r"(?<![\w.])(\d+)(?=\.\w|$)"  # a block of a model that is itself the list


class NotCarried(Exception):
    """A block has to do with blocks other than those next to it, so others may differ from it."""


class _Place(NamedTuple):
    """A block that was looked at: the name of its list, and its place among those that stayed."""

    blocks: str
    place: int


class _Block(NamedTuple):
    """A block of the model: the name of its list, its number, and which place it is like."""

    blocks: str
    number: int
    place: int


_Owns = dict[str, _Block]


def carried(found: ModelMap, lists: Sequence[BlockList]) -> ModelMap:
    """The map of the model, given that of the model shortened to what stays of `lists`.

    Raises:
        NotCarried: findings about one block have to do with others than its neighbours.
    """
    carrier = _Carrier(lists)
    blocks = [carrier.under(b, owns) for b, owns in carrier.spread(found.blocks, _named)]
    channels = list(carrier.spread(enumerate(found.channels), lambda each: _tensors(each[1])))
    places = {(old, *owns.values()): new for new, ((old, _), owns) in enumerate(channels)}

    def convolution(each: MappedConvolution, owns: _Owns) -> MappedConvolution:
        old = each.channels
        new = None if old is None else places.get((old, *owns.values()), places.get((old,)))
        return replace(carrier.under(each, owns), channels=new)

    return replace(
        found,
        stream=carrier.under(found.stream, {}),
        blocks=tuple(replace(block, index=number) for number, block in enumerate(blocks)),
        norms=carrier.all(found.norms),
        attentions=carrier.all(found.attentions),
        mlps=carrier.all(found.mlps),
        channels=tuple(carrier.under(each, owns) for (_, each), owns in channels),
        convolutions=tuple(
            convolution(*each) for each in carrier.spread(found.convolutions, _named)
        ),
        tables=carrier.under(found.tables, {}),
        head=carrier.under(found.head, {}),
        unknown={
            carrier.under(name, owns): carrier.under(why, owns)
            for (name, why), owns in carrier.spread(found.unknown.items(), lambda each: each[:1])
        },
    )


def _named(part: Any) -> list[str]:
    return [part.name]


def _tensors(units: Units) -> list[str]:
    return [piece.tensor for piece in units.slices]


class _Carrier:
    """Finds blocks in names, and puts the numbers of others there."""

    def __init__(self, lists: Iterable[BlockList]) -> None:
        self._lists = {each.name: each for each in lists}
        self._patterns = {name: _pattern(name) for name in self._lists}

    def all(self, parts: Iterable[Any]) -> tuple[Any, ...]:
        """Parts that are in no block, and those of blocks that are single layers."""
        return tuple(self.under(part, owns) for part, owns in self.spread(parts, _named))

    def spread(
        self,
        items: Iterable[T],
        names: Callable[[T], Iterable[str]],
        but: Iterable[str] = (),
    ) -> Iterator[tuple[T, _Owns]]:
        """Each item with each block like the one that it is of, or once where it is of none.

        Items of a list's blocks, in the order of blocks, are given in that order for all blocks.

        Args:
            names: all names of an item by which its block is found.
            but: lists that are left alone.

        Raises:
            NotCarried: an item is of several blocks.
        """
        placed = [(item, self._owner(names(item), but)) for item in items]
        for run in _runs(placed):
            owner = run[0][1]
            if owner is None:
                yield run[0][0], {}
                continue
            for number, place in enumerate(self._lists[owner.blocks].like):
                own = {owner.blocks: _Block(owner.blocks, number, place)}
                yield from ((item, own) for item, each in run if each and each.place == place)

    def _owner(self, names: Iterable[str], but: Iterable[str]) -> _Place | None:
        found: set[_Place | None] = set()
        for text in names:
            places = {place for place in self._places(text) if place.blocks not in but}
            found |= places or {None}
        if len(found) > 1:
            raise NotCarried
        return next(iter(found), None)

    def _places(self, text: str) -> Iterator[_Place]:
        for name, pattern in self._patterns.items():
            yield from (_Place(name, int(match[1])) for match in pattern.finditer(text))

    def under(self, value: Any, owns: _Owns) -> Any:
        """A part as it is for these blocks; names of other lists' blocks, for each of them."""
        if isinstance(value, str):
            return self._renamed(value, owns)
        if isinstance(value, tuple) and all(isinstance(v, str | MappedSlice) for v in value):
            return tuple(
                self.under(each, {**owns, **other})
                for each, other in self.spread(value, _own_name, but=owns)
            )
        if isinstance(value, tuple):
            return tuple(self.under(each, owns) for each in value)
        if is_dataclass(value) and not isinstance(value, type):
            changes = {f.name: self.under(getattr(value, f.name), owns) for f in fields(value)}
            return replace(value, **changes)
        return value

    def _renamed(self, text: str, owns: _Owns) -> str:
        for name, pattern in self._patterns.items():
            text = pattern.sub(lambda match, n=name: self._renumbered(match, n, owns), text)  # type: ignore[misc]
        return text

    def _renumbered(self, match: re.Match[str], name: str, owns: _Owns) -> str:
        place = int(match[1])
        if (own := owns.get(name)) is None:
            number = list(self._lists[name].kept)[place]
        elif abs(place - own.place) > 1:
            raise NotCarried
        else:
            number = own.number + place - own.place
        return match[0][: match.start(1) - match.start()] + str(number)


def _runs(
    placed: Iterable[tuple[T, _Place | None]],
) -> Iterator[list[tuple[T, _Place | None]]]:
    """Items of blocks of one list, one after the other; items of no block, each alone."""
    run: list[tuple[T, _Place | None]] = []
    for item, place in placed:
        before = run[-1][1] if run else None
        if run and not (before and place and before.blocks == place.blocks and before <= place):
            yield run
            run = []
        run.append((item, place))
    if run:
        yield run


def _own_name(each: str | MappedSlice) -> list[str]:
    return [each if isinstance(each, str) else each.tensor]


def _pattern(name: str) -> re.Pattern[str]:
    """A block of the list `name` in a text, with its number."""
    return re.compile(rf"(?<![\w.]){re.escape(name)}\.(\d+)(?!\w)" if name else _NUMBERED)
