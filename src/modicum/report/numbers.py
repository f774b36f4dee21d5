"""Numbers as people read them, and numbers out of files that anything may have happened to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from modicum.core.units import format_bytes, format_duration

NONE = "–"  # what stands where there is no number


def number(value: Any) -> float | int | None:
    """`value` if it is a finite number, else None: a run folder may hold NaN, null, text."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


def as_count(value: float | None) -> float | int | None:
    """A count as an integer, which a column of floats made a float.

    >>> as_count(3.0), as_count(0.5), as_count(None)
    (3, 0.5, None)
    """
    return int(value) if value is not None and float(value).is_integer() else value


def short(value: float) -> str:
    """A count in three digits, with the SI prefix that tokens and parameters are quoted in.

    >>> short(950), short(12_345), short(30_000_000)
    ('950', '12.3 k', '30 M')
    """
    magnitude = abs(value)
    if magnitude >= 1e15:
        return f"{value:.3g}"
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if magnitude >= 0.9995 * factor:
            scaled = value / factor
            return f"{scaled:.0f} {prefix}" if abs(scaled) >= 99.95 else f"{scaled:.3g} {prefix}"
    return f"{value:.0f}" if magnitude >= 99.95 or value == int(value) else f"{value:.3g}"


def in_bytes(value: float) -> str:
    """`format_bytes`, short also for what no machine can hold and a damaged file may say."""
    return format_bytes(value) if abs(value) < 1e15 else f"{value:.3g} B"


def percent(value: float, *, signed: bool = False) -> str:
    """A share as per cent, with one decimal below ten.

    >>> percent(0.0423), percent(0.5), percent(-0.03, signed=True)
    ('4.2 %', '50 %', '−3.0 %')
    """
    hundredths = 100 * value
    digits = 1 if round(abs(hundredths), 1) < 10 else 0
    text = f"{abs(hundredths):.{digits}f} %"
    if hundredths < 0 and float(text[:-2]) != 0:
        return f"−{text}"
    return f"+{text}" if signed and float(text[:-2]) != 0 else text


def spent(cost: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Money and energy of a plan or a run, named and with their units; what is not known is not.

    >>> spent({"money": 5.004, "currency": "EUR", "kwh": 0.81234})
    [('money', '5.00 EUR'), ('energy', '0.812 kWh')]
    """
    found = []
    if (money := number(cost.get("money"))) is not None:
        digits = ".2f" if money >= 0.995 else ".2g"
        found.append(("money", f"{money:{digits}} {cost.get('currency')}"))
    if (energy := number(cost.get("kwh"))) is not None:
        found.append(("energy", f"{energy:.3g} kWh"))
    return found


def per(unit: str) -> str:
    """What a loss is, by what it is a mean over.

    >>> per("tokens"), per("images")
    ('nats per token', 'mean over images')
    """
    return "nats per token" if unit == "tokens" else f"mean over {unit}"


def quantity(value: Any, unit: str) -> str:
    """`value` with its unit: "bytes", "seconds", "tokens/s", "nats" or "" (a plain count)."""
    known = number(value)
    if known is None:
        return NONE
    if unit == "bytes":
        return in_bytes(known)
    if unit == "seconds":
        if 0 < known < 0.001:
            return "< 1 ms"
        return f"{known:.2g} s" if 0 < known < 9.5 else format_duration(known)
    if unit == "tokens/s":
        return f"{known:,.0f} tokens/s" if known >= 10 else f"{known:.2g} tokens/s"
    if unit == "nats":
        return f"{known:.4f}" if abs(known) < 100 else f"{known:.4g}"
    return f"{known:,}"
