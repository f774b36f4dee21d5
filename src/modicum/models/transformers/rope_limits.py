"""Where rotary positions change for an entire row, as it has become longer than a limit.

LongRoPE (Ding et al., arXiv 2402.13753) takes other factors in rows that are longer than those that
the model was first trained on; dynamic NTK scaling takes a larger base with each token beyond the
model's longest row. Earlier tokens of the row then have other keys, too. transformers decides it by
the largest position of all rows that are computed together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_SWITCHED = ("longrope", "su")  # as files have spelled LongRoPE
_ORIGINAL, _LONGEST = "original_max_position_embeddings", "max_position_embeddings"


@dataclass(frozen=True)
class RopeLimits:
    """Lengths of rows, in tokens, up to which no position depends on how long its row is.

    Args:
        switch: beyond it there are other frequencies, the same for all longer rows.
        growth: beyond it each length has frequencies of its own.

    >>> RopeLimits(switch=4096).alike(4096), RopeLimits(switch=4096).alike(4097)
    (True, False)
    """

    switch: int | None = None
    growth: int | None = None

    @classmethod
    def of(cls, known: Any) -> RopeLimits:
        """The limits of a configuration of transformers; 0 where it has one and does not say it."""
        switches, growths = list[int](), list[int]()
        for entry in _entries(known):
            kind = str(entry.get("rope_type", entry.get("type")))
            if kind in _SWITCHED:
                switches.append(_number(entry.get(_ORIGINAL, getattr(known, _ORIGINAL, None))))
            if "dynamic" in kind:
                growths.append(_number(getattr(known, _LONGEST, None)))
        return cls(min(switches, default=None), min(growths, default=None))

    @property
    def shortest(self) -> int | None:
        """The shorter one; None: rows of any length are alike."""
        return min((each for each in (self.switch, self.growth) if each is not None), default=None)

    def alike(self, tokens: int) -> bool:
        """Whether documents that share a row of so many tokens have the positions of each alone."""
        return self.shortest is None or tokens <= self.shortest

    def keeps(self, before: int, after: int) -> bool:
        """Whether keys of a row's first `before` tokens are those of a row of `after` tokens."""
        switched = self.switch is not None and before <= self.switch < after
        return not switched and (self.growth is None or after <= self.growth)


def _entries(known: Any) -> Iterator[Mapping[str, Any]]:
    """What a configuration says of rotary positions, of each kind of layer where they differ."""
    for name in ("rope_parameters", "rope_scaling"):
        given = getattr(known, name, None)
        if isinstance(given, Mapping):
            yield given
            yield from (each for each in given.values() if isinstance(each, Mapping))


def _number(given: Any) -> int:
    return given if isinstance(given, int) else 0
