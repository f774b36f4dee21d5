"""What is said where there is one rank, and what ranks do between them has nothing to do."""

from __future__ import annotations

import inspect
import warnings

NOTHING_TRAVELS = "there is one rank, and nothing travels: gradients are used as they are"
NOBODY_WAITS = "there is one rank, and no other waits for it: nothing is watched"


def warn_of_one_rank(said: str) -> None:
    """Warn, at the line outside this package from which it was called."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").startswith("modicum."):
        frame, level = frame.f_back, level + 1
    warnings.warn(said, stacklevel=level)
