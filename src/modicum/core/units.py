"""Sizes, counts and durations as people write them. Imports nothing heavy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_BYTES = {
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMGT", start=1)},
    **{f"{p}iB": 1024**i for i, p in enumerate("KMGT", start=1)},
}
_COUNTS = {"": 1, **{letter: 1000**i for i, letter in enumerate("kmbt", start=1)}}
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
BYTES_FORMAT = "a number and a unit: 8GB (10^9 bytes), 8GiB (2^30 bytes), 512MB, 750MiB"
COUNT_FORMAT = "a number, and a letter for many: 500_000, 500k, 2M (10^6), 1.5B (10^9), 1T (10^12)"
DURATION_FORMAT = "a number and a unit: 30s, 10m, 2h, 1d"


def parse_bytes(text: str | int) -> int:
    """`"8GB"` is 8 * 10**9 bytes, `"8GiB"` 8 * 2**30; a bare integer is bytes.

    Raises:
        ValueError: the unit cannot be read, or the size is not above zero.

    >>> parse_bytes("1.5GiB")
    1610612736
    """
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise ValueError(f"not a size; write {BYTES_FORMAT}")
    if isinstance(text, int):
        size = text
    else:
        match = re.fullmatch(r"\s*([-+]?[0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
        units = {name.lower(): factor for name, factor in _BYTES.items()} | {"": 1}
        if match is None or match[2].lower() not in units:
            raise ValueError(f"not a size; write {BYTES_FORMAT}")
        size = round(Fraction(match[1]) * units[match[2].lower()])
    if size <= 0:
        raise ValueError(f"a size must be above zero; write {BYTES_FORMAT}")
    return size


def parse_count(text: str | int) -> int:
    """`"500k"` is 500,000, `"1.5B"` 1.5 * 10**9; digits may be grouped, as in `"500_000"`.

    Raises:
        ValueError: it cannot be read, is no integer, or is not above zero.

    >>> parse_count("1.5B")
    1500000000
    """
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise ValueError(f"not a count; write {COUNT_FORMAT}")
    if isinstance(text, int):
        count = Fraction(text)
    else:
        number = r"-?[0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?"
        match = re.fullmatch(rf"\s*({number})\s*([A-Za-z]?)\s*", text)
        if match is None or match[2].lower() not in _COUNTS:
            raise ValueError(f"not a count; write {COUNT_FORMAT}")
        count = Fraction(match[1].replace("_", "")) * _COUNTS[match[2].lower()]
    if count <= 0 or count.denominator != 1:
        raise ValueError(f"a count is an integer above zero; write {COUNT_FORMAT}")
    return int(count)


def format_bytes(count: float) -> str:
    """Bytes for people, in powers of ten as disks and budgets count them.

    >>> format_bytes(1_530_000_000)
    '1.53 GB'
    """
    sign, size = ("-", -count) if count < 0 else ("", count)
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            digits = ".3g" if size < 999.5 * factor else ".0f"
            return f"{sign}{size / factor:{digits}} {unit}"
    return f"{sign}{size:.0f} B"


def parse_duration(text: str) -> float:
    """Seconds in `"30s"`, `"10m"`, `"2h"`, `"1d"`.

    Raises:
        ValueError: it cannot be read, or is not above zero.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smhd])\s*", text)
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"not a duration; write {DURATION_FORMAT}")
    return float(match[1]) * _SECONDS[match[2]]


def format_duration(seconds: float) -> str:
    """A duration for people: `42 s`, `3 min 05 s`, `2 h 10 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_count(count: int, word: str) -> str:
    """So many of something.

    >>> format_count(1, "step"), format_count(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{count:,} {word}{'s' * (count != 1)}"


@dataclass(frozen=True)
class Every:
    """How often something happens: every so many steps, or every so many seconds."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, value: str | int) -> Every:
        """`100` is steps, `"10m"` a duration.

        Raises:
            ValueError: neither a positive number of steps nor a duration.
        """
        if isinstance(value, int) and not isinstance(value, bool):
            if value < 1:
                raise ValueError("the number of steps must be at least 1")
            return cls(steps=value)
        if isinstance(value, str) and value.strip().isdecimal():
            return cls.parse(int(value))
        if isinstance(value, str):
            try:
                return cls(seconds=parse_duration(value))
            except ValueError:
                pass
        raise ValueError(f"write a number of steps, or {DURATION_FORMAT}")

    def due(self, step: int, elapsed: float) -> bool:
        """Whether it is time, after `step` steps and `elapsed` seconds since last time."""
        if self.steps is not None:
            return step % self.steps == 0
        return self.seconds is not None and elapsed >= self.seconds
