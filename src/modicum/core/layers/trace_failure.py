"""Why a model could not be traced, as a sentence that names the line of its author."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

from modicum.core.torch_private import data_decided

# Frames of these are of no help: the line that called into them is.
_OURS = ("trace.py", "torch_private.py")


def why_not(error: Exception) -> str:
    """What went wrong while a model was traced, and where.

    >>> try:
    ...     raise TypeError("no such size")
    ... except TypeError as error:
    ...     why_not(error)
    'TypeError: no such size'
    """
    said = " ".join(str(error).split()) or "nothing was said"
    if (operation := data_decided(error)) is not None:
        said = f"data decides what runs, and a trace has none ({operation})"
    else:
        said = f"{type(error).__name__}: {said}"
    where = _line(error)
    return said if where is None else f"{said}; {where}"


def _line(error: Exception) -> str | None:
    """The last line that is neither torch's nor the trace's."""
    libraries, here = Path(torch.__file__).parent, Path(__file__).parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        ours = file.name in _OURS and here.parent in file.parents
        if libraries in file.parents or ours or not file.is_file():
            continue
        return f"{file.name}:{frame.lineno}, in {frame.name}"
    return None
