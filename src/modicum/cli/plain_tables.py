"""Tables as plain text, for pipes and logs: aligned, and no wider than a terminal usually is."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from itertools import zip_longest

WIDTH = 80
_LONGEST = 32  # a longer word is broken rather than that others wrap
_NARROWEST = 12  # a column of text is made no narrower than this, or than its header


def plain(
    headers: Sequence[str],
    cells: Sequence[Sequence[str]],
    right: Sequence[bool],
    title: str | None = None,
    width: int = WIDTH,
) -> str:
    """The table as text: two spaces between columns, a rule under the headers.

    Where it would be wider than `width`, the widest columns of text wrap, between words as long as
    that is enough; each row begins a line, and what wraps stands in its column below. Numbers never
    wrap, and a table of many columns may stay wider. A path is never broken, so that it can be
    copied: where it is wider than its column, so is its line.

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
    words = [
        _longest_word(line[i] for line in lines[1:] if i < len(line)) for i in range(len(least))
    ]
    unbroken = [min(max(pair), each) for *pair, each in zip(least, words, widths, strict=True)]
    widths = _fitted(_fitted(widths, unbroken, right, width), least, right, width)
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


def is_path(word: str) -> bool:
    """Whether a word is a path, or an address, that people may copy.

    >>> is_path("/home/me/lora.py"), is_path("runs/mine/model"), is_path("tokens/s")
    (True, True, False)
    """
    return word.startswith(("/", "./", "../", "~/")) or ("/" in word and len(word) > 12)


def longest_path(cells: Iterable[str]) -> int:
    """Columns of the longest path in the cells; 0 without any."""
    return max(
        (columns(word) for cell in cells for word in cell.split() if is_path(word)), default=0
    )


def _longest_word(cells: Iterable[str]) -> int:
    """Columns of the longest word that is not broken anyway."""
    found = (columns(word) for cell in cells for word in cell.split())
    return max((each for each in found if each <= _LONGEST), default=0)


def _wrapped(text: str, width: int) -> list[str]:
    """The text in lines of at most so many columns; a longer word is broken, but no path."""
    lines, line = [], ""
    for word in text.split(" ") if columns(text) > width else [text]:
        joined = f"{line} {word}" if line else word
        if columns(joined) <= width:
            line = joined
            continue
        if line:
            lines.append(line)
        line = ""
        if is_path(word):
            lines.append(word)
            continue
        for character in word:
            if columns(line + character) > width:
                lines.append(line)
                line = ""
            line += character
    return [*lines, line] if line or not lines else lines


def printable(text: str) -> str:
    """The text without what would move a terminal's cursor or change its colours."""
    return "".join(each if each.isprintable() or each in "\n\t" else "�" for each in text)
