"""Text in a README that is made from results: it stands between two markers, which stay."""

from __future__ import annotations


def between(readme: str, begin: str, end: str, text: str) -> str:
    """The README with `text` between two markers; as it is where one of them is missing."""
    before, found, rest = readme.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        return readme
    return f"{before}{begin}\n{text}{end}{after}"
