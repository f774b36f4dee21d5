"""Warnings of libraries and of modicum, as lines on standard error."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print what is warned of within the block, a line each, without where in the code it was."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
    for warning in found:
        print(f"warning: {warning.message}", file=sys.stderr)
