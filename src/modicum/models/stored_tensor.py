"""Whether a tensor of a file is what a configuration calls for. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from modicum.core.errors import InputError

_FLOATS = ("F64", "F32", "F16", "BF16")
_INTEGERS = ("I32", "I64")


class StoredTensor(Protocol):
    """A tensor of a file, or one that is made of several."""

    @property
    def file(self) -> Path: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def check_stored(
    name: str, entry: StoredTensor, shape: tuple[int, ...], *, integers: bool = False
) -> None:
    """Refuse a tensor of another shape, or of a type that is not read.

    Args:
        integers: whether it holds integers, and not weights.

    Raises:
        InputError: with the file and the tensor's name.
    """
    if entry.shape != shape:
        raise InputError(
            f"the tensor's shape is {list(entry.shape)}, and by config.json {list(shape)}",
            file=entry.file,
            field=name,
        )
    allowed = _INTEGERS if integers else _FLOATS
    if entry.dtype not in allowed:
        raise InputError(
            "weights of this type are not supported",
            file=entry.file,
            field=name,
            value=entry.dtype,
            allowed=", ".join(allowed),
        )
