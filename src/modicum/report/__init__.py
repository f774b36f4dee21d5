"""What a run folder says, for people: `write` makes its `report.html`, `summary` a plain dict.

    >>> from modicum import report
    >>> report.write("runs/demo")                                            # doctest: +SKIP
    PosixPath('runs/demo/report.html')

Importing this imports neither jinja2 nor matplotlib: `write` does, when it is called.
"""

from __future__ import annotations

from modicum.report.facts import summary
from modicum.report.run import write

__all__ = ["summary", "write"]
