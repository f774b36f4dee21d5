"""What a run folder says, for people: `write` makes its `report.html`, `summary` a dict.

    >>> from modicum import report
    >>> report.write("runs/demo")                                            # doctest: +SKIP
    PosixPath('runs/demo/report.html')

`compare` makes one page of several runs. `write_comparison` makes that of the folder of a
`modicum compare`. Importing this does not import jinja2: writing does.
"""

from __future__ import annotations

from modicum.report.comparison import is_comparison, write_comparison
from modicum.report.facts import summary
from modicum.report.run import compare, write

__all__ = ["compare", "is_comparison", "summary", "write", "write_comparison"]
