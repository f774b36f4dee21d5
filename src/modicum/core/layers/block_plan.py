"""What a block of a model has of its own: widths, and what its branches leave out of the stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from modicum.core.errors import InputError

Skips = tuple[tuple[int, int], ...]

_WIDTHS = ("heads", "kv_heads", "mlp_width")
_SKIPS = ("mixer_skips", "mlp_skips")


@dataclass(frozen=True)
class BlockPlan:
    """How a block differs from the model's others; None and () mean that it does not.

    A block has two branches, its mixer and then its MLP, which each read the residual stream and
    add to it. A branch that skips others reads the stream without what those have added.

    Args:
        heads: of its attention.
        kv_heads: of its keys and values.
        mlp_width: the inner width of its MLP.
        mixer_skips, mlp_skips: branches that the mixer, or the MLP, does not read, counted back
            from it over all blocks: 1 is the branch directly before. Numbers, or pairs of a first
            and a last one; they are kept as pairs, in order.

    Raises:
        InputError: a width or a number is below 1, or the heads are no multiple of the kv heads.

    >>> BlockPlan(heads=2, mlp_skips=[2, 3, 4, 7]).as_json()
    {'heads': 2, 'mlp_skips': [[2, 4], 7]}
    """

    heads: int | None = None
    kv_heads: int | None = None
    mlp_width: int | None = None
    mixer_skips: Skips = ()
    mlp_skips: Skips = ()

    def __post_init__(self) -> None:
        for name in _WIDTHS:
            value = getattr(self, name)
            if value is not None and not _counts(value):
                raise InputError("must be an integer of at least 1", field=name, value=value)
        check_heads(self.heads, self.kv_heads)
        for name in _SKIPS:
            object.__setattr__(self, name, _in_order(getattr(self, name), name))

    @property
    def widths(self) -> dict[str, int]:
        """Its own widths, by field."""
        found = {name: getattr(self, name) for name in _WIDTHS}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def skips(self) -> tuple[Skips, Skips]:
        """Of its mixer, and of its MLP."""
        return self.mixer_skips, self.mlp_skips

    def without(self, *, heads: int, kv_heads: int, mlp_width: int) -> BlockPlan:
        """The block without the widths that are these: the model's own."""
        return replace(
            self,
            heads=None if self.heads == heads else self.heads,
            kv_heads=None if self.kv_heads == kv_heads else self.kv_heads,
            mlp_width=None if self.mlp_width == mlp_width else self.mlp_width,
        )

    def as_json(self) -> dict[str, Any]:
        """The block as plain values, what it shares with the others left out."""
        skips = {
            name: [first if first == last else [first, last] for first, last in getattr(self, name)]
            for name in _SKIPS
        }
        return {**self.widths, **{name: value for name, value in skips.items() if value}}

    @classmethod
    def from_json(cls, raw: Any) -> BlockPlan:
        """The block that `as_json` wrote.

        Raises:
            InputError: `raw` is no section of these fields, or a value is out of range.
        """
        known = [field.name for field in fields(cls)]
        if not isinstance(raw, dict) or not raw.keys() <= set(known):
            problem = "of a block these can differ from the model's others"
            wrong = [name for name in raw if name not in known] if isinstance(raw, dict) else []
            word = str(wrong[0]) if wrong else None
            raise InputError(
                problem, value=raw, allowed=", ".join(known), candidates=known, word=word
            )
        return cls(**raw)


def check_heads(heads: int | None, kv_heads: int | None) -> None:
    """Check that the kv heads can be shared by the heads.

    Raises:
        InputError: they cannot.
    """
    if heads is not None and kv_heads is not None and heads % kv_heads:
        problem = f"the {heads} heads must be a multiple of the key and value heads"
        raise InputError(problem, field="kv_heads", value=kv_heads)


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _in_order(given: Any, name: str) -> Skips:
    """The numbers as pairs of first and last, in order, those that touch in one."""
    pairs = []
    for each in given if isinstance(given, Iterable) and not isinstance(given, str) else [given]:
        pair = tuple(each) if isinstance(each, (list, tuple)) else (each, each)
        if len(pair) != 2 or not all(map(_counts, pair)) or pair[0] > pair[1]:
            problem = "a skip is an integer of at least 1, or a pair of a first and a last one"
            raise InputError(problem, field=name, value=each)
        pairs.append(pair)
    found: list[tuple[int, int]] = []
    for first, last in sorted(pairs):
        if found and first <= found[-1][1] + 1:
            first, last = found[-1][0], max(last, found.pop()[1])
        found.append((first, last))
    return tuple(found)
