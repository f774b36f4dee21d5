"""Libraries that a thin install does not have: imported when something needs them."""

from __future__ import annotations

import importlib
from typing import Any

from modicum.core.errors import InputError


def library(name: str, extra: str, purpose: str) -> Any:
    """Import a library that one of modicum's extras brings.

    Args:
        purpose: what needs it, the subject of the error's sentence.

    Raises:
        InputError: it cannot be imported.

    >>> library("no_such_library", "tuning", "this")
    Traceback (most recent call last):
    modicum.core.errors.InputError: this needs no_such_library, which cannot be imported (No module
    named 'no_such_library'): pip install 'modicum[tuning]'
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(
            f"{purpose} needs {name}, which cannot be imported ({error}): "
            f"pip install 'modicum[{extra}]'"
        ) from None
