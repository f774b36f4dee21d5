"""The manifest of a checkpoint: a JSON file that says what is there, and its own checksum.

Its first lines hold the SHA-256 of everything that follows them, to the byte. Every other file is
named with its size and its CRC-32, so that what the manifest accounts for is what was written.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from modicum.checkpoint.tensor_file import file_checksum
from modicum.checkpoint.tensor_slices import DTYPES, TensorSlice
from modicum.core.errors import InputError
from modicum.core.files import regular

MANIFEST, FORMAT = "manifest.json", 2


class Damaged(InputError):
    """A checkpoint is not what was written."""


def tensor_file(rank: int) -> str:
    """The name of a rank's file of tensors."""
    return f"rank-{rank:05d}.safetensors"


def tensors_text(owned: Sequence[Sequence[TensorSlice]], everybody: Iterable[TensorSlice]) -> str:
    """What a manifest tells of tensors, as JSON: dtype, shape, and the pieces, each with its file.

    Args:
        owned: what each rank writes.
        everybody: what the ranks hold, in which a tensor may be empty and written by nobody.
    """
    tensors: dict[str, dict[str, Any]] = {}
    for piece in everybody:
        tensors[piece.name] = {"dtype": piece.dtype, "shape": piece.shape, "pieces": []}
    for rank, pieces in enumerate(owned):
        for piece in pieces:
            box = {"offsets": piece.offsets, "sizes": piece.sizes}
            tensors[piece.name]["pieces"].append({"file": tensor_file(rank)} | box)
    lines = [f"{json.dumps(name)}: {json.dumps(told)}" for name, told in tensors.items()]
    return "{\n " + ",\n ".join(lines) + "\n}" if lines else "{}"


def write_manifest(path: Path, content: Mapping[str, Any], tensors: str) -> None:
    """Write a manifest and push it to the disk; `tensors` is JSON already."""
    lines = [f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in content.items()]
    body = (",\n".join([*lines, f'"tensors": {tensors}']) + "\n}\n").encode()
    with open(path, "wb") as handle:
        handle.write(_head(body) + body)
        handle.flush()
        os.fsync(handle.fileno())


def _head(body: bytes) -> bytes:
    return f'{{\n"digest": "{hashlib.sha256(body).hexdigest()}",\n'.encode()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check a checkpoint's manifest.

    Raises:
        Damaged: it is not what was written.
        InputError: another version of modicum wrote it, or it may not be read.
    """
    path = folder / MANIFEST
    try:
        text = regular(path).read_bytes()
        if text.startswith(b'{\n  "format": 1,'):
            _check_format(folder, 1)
        size = len(_head(b""))
        head, body = text[:size], text[size:]
        if head != _head(body):
            raise Damaged("damaged: its checksum is another", file=path)
        content: dict[str, Any] = json.loads(b"{" + body)
        _check_format(folder, content["format"])
        _check_places(content)
    except PermissionError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=folder) from None
    except FileNotFoundError:
        raise Damaged("damaged: this file is missing", file=path) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"damaged: {error}", file=path) from None
    return content


def _check_places(content: Mapping[str, Any]) -> None:
    """Make sure that tensors are in files of the folder, which have checksums.

    Raises:
        ValueError: one is elsewhere.
    """
    files = content["files"]
    pieces = (box["file"] for each in content["tensors"].values() for box in each["pieces"])
    for name in {*files, *pieces}:
        if name not in files or Path(name).name != name:
            raise ValueError(f"it names the file {name!r}, which is none of the folder's")


def _check_format(folder: Path, found: Any) -> None:
    if found != FORMAT:
        raise InputError(
            "was written by another version of modicum",
            file=folder,
            field="format",
            value=found,
            allowed=str(FORMAT),
        )


def check_files(folder: Path, content: Mapping[str, Any]) -> None:
    """Make sure that the files that a manifest names are what was written.

    Raises:
        Damaged: one is not, or is missing.
        InputError: one may not be read.
    """
    for name, expected in content["files"].items():
        try:
            if (folder / name).stat().st_size != expected["bytes"]:
                raise Damaged("damaged: its size is another", file=folder / name)
            if file_checksum(folder / name) != expected["crc32"]:
                raise Damaged("damaged: its checksum is another", file=folder / name)
        except PermissionError as error:
            raise InputError(f"cannot be read: {error.strerror}", file=folder) from None
        except FileNotFoundError:
            raise Damaged("damaged: this file is missing", file=folder / name) from None
        except OSError as error:
            raise Damaged(f"damaged: {error}", file=folder / name) from None


def pieces_of(content: Mapping[str, Any], name: str) -> dict[str, list[TensorSlice]]:
    """The pieces of a tensor by the file that they are in."""
    tensor = content["tensors"][name]
    files: dict[str, list[TensorSlice]] = {}
    for box in tensor["pieces"]:
        files.setdefault(box["file"], []).append(TensorSlice.of_json(name, tensor, box))
    return files


def dtype_of(content: Mapping[str, Any], name: str) -> Any:
    """The dtype of a tensor, as torch has it."""
    return DTYPES[content["tensors"][name]["dtype"]]
