"""Tables as plain text, for pipes and logs: aligned, and no wider than a terminal usually is."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from itertools import zip_longest

WIDTH = 80
_NARROWEST = 12  # a column of text is made no narrower than this, or than its header


def plain(
    headers: Sequence[str],
    cells: Sequence[Sequence[str]],
    right: Sequence[bool],
    title: str | None = None,
    width: int = WIDTH,
) -> str:
    """The table as text: two spaces between columns, a rule under the headers.

    Where it would be wider than `width`, the widest columns of text wrap; each row begins a line,
    and what wraps stands in its column below. Numbers never wrap, and a table of many columns may
    stay wider.

    Args:
        right: of each column, whether it is aligned to the right, as numbers are.

    >>> print(plain(("a", "why"), [("x", "one two three four")], (False, False), width=17))
    a  why
    -  --------------
    x  one two three
       four
    """
    lines = [list(headers), *(list(row) for row in cells)]
    widths = [max(columns(line[i]) for line in lines if i < len(line)) for i in range(len(headers))]
    least = [max(_NARROWEST, columns(header)) for header in headers]
    widths = _fitted(widths, least, right, width)
    lines.insert(1, ["-" * each for each in widths])
    text = [title] if title else []
    for line in lines:
        wrapped = [_wrapped(cell, each) for cell, each in zip(line, widths, strict=False)]
        for pieces in zip_longest(*wrapped, fillvalue=""):
            padded = []
            for piece, each, to_right in zip(pieces, widths, right, strict=False):
                space = " " * (each - columns(piece))
                padded.append(space + piece if to_right else piece + space)
            text.append("  ".join(padded).rstrip())
    return "\n".join(text) + "\n"


def columns(text: str) -> int:
    """Columns of a terminal that `text` takes: wide East Asian characters take two."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def _fitted(
    widths: Sequence[int], least: Sequence[int], right: Sequence[bool], width: int
) -> list[int]:
    """The widths of columns of text made smaller, the widest first, until the table fits."""
    fitted, room = list(widths), width - 2 * (len(widths) - 1)
    while (over := sum(fitted) - room) > 0:
        order = [i for i in range(len(fitted)) if not right[i] and fitted[i] > least[i]]
        if not order:
            break
        widest = max(order, key=fitted.__getitem__)
        next_widest = max((fitted[i] for i in order if i != widest), default=0)
        lower = max(least[widest], next_widest - 1, fitted[widest] - over)
        fitted[widest] = min(lower, fitted[widest] - 1)
    return fitted


def _wrapped(text: str, width: int) -> list[str]:
    """The text in lines of at most so many columns; a word that is longer is broken."""
    lines, line = [], ""
    for word in text.split(" ") if columns(text) > width else [text]:
        joined = f"{line} {word}" if line else word
        if columns(joined) <= width:
            line = joined
            continue
        if line:
            lines.append(line)
        line = ""
        for character in word:
            if columns(line + character) > width:
                lines.append(line)
                line = ""
            line += character
    return [*lines, line]


def printable(text: str) -> str:
    """The text without what would move a terminal's cursor or change its colours."""
    return "".join(each if each.isprintable() or each in "\n\t" else "�" for each in text)
