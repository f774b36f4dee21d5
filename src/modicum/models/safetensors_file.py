"""What a safetensors file says about itself, checked without torch and without reading weights.

Format: 8 bytes little-endian length, a JSON header of that length, then the tensors' bytes
(https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from modicum.core.errors import InputError
from modicum.core.files import read_json

if TYPE_CHECKING:
    import torch

_BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 8),
}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_LONGEST_HEADER = 100_000_000  # the format's own limit, in bytes


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: `dtype` in the format's own names (F32, BF16...), `bytes` its size.

    `name` is the one that it has in the file.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    name: str


def read_entries(file: Path) -> dict[str, TensorEntry]:
    """The tensors that `file` holds, by name.

    Raises:
        InputError: the file is missing, is not safetensors, or was truncated.
    """
    if not file.is_file():
        raise InputError("there is no such file", file=file)
    size = file.stat().st_size
    with open(file, "rb") as handle:
        start = handle.read(8)
        length = int.from_bytes(start, "little")
        if start == b"version ":
            raise InputError(
                "this is a Git LFS pointer, not the weights; run `git lfs pull` in the folder",
                file=file,
            )
        if len(start) < 8 or length > _LONGEST_HEADER:
            raise InputError("this is not a safetensors file", file=file)
        if 8 + length > size:
            raise InputError(
                f"the file was truncated in its header: it has {size} of at least {8 + length} "
                "bytes; copy or download it again",
                file=file,
            )
        text = handle.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):  # neither UTF-8 nor JSON, or not meant
        raise InputError("the header is not JSON: not a safetensors file", file=file) from None
    if not isinstance(header, dict):
        raise InputError("the header is not a JSON object: not a safetensors file", file=file)
    header.pop("__metadata__", None)
    entries, end = {}, 0
    for name, raw in header.items():
        entries[name], last = _entry(file, name, raw)
        end = max(end, last)
    if 8 + length + end != size:
        raise InputError(
            f"the file has {size} bytes, its header describes {8 + length + end}; it was truncated "
            "or damaged: copy or download it again",
            file=file,
        )
    return entries


def _entry(file: Path, name: str, raw: Any) -> tuple[TensorEntry, int]:
    """The entry of one tensor, and where its bytes end."""
    try:
        dtype, shape, (begin, end) = raw["dtype"], tuple(raw["shape"]), raw["data_offsets"]
        size = math.prod(shape) * _BITS[dtype] // 8
        sound = begin >= 0 and end - begin == size and all(count >= 0 for count in shape)
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise InputError("the header's entry cannot be read", file=file, field=name)
    return TensorEntry(file, dtype, shape, size, name), end


class TensorReader:
    """Reads tensors of files, on the CPU, one file open until `most` bytes of it were read.

    A file's pages count as resident as long as it is mapped, and the full file's would double the
    peak. Opening one takes milliseconds where it holds thousands of experts.
    """

    def __init__(self, most: int) -> None:
        self._most, self._left = most, 0
        self._path: Path | None = None
        self._file: Any = None

    def read(self, entry: TensorEntry, before: int = 0, rows: int | None = None) -> torch.Tensor:
        """A tensor, or `rows` of its rows after the first `before`.

        It lies in the file's own pages: copy it, and let go of it.

        Raises:
            InputError: it cannot be read.
        """
        from safetensors import SafetensorError, safe_open

        end = None if rows is None else before + rows
        count = max(1, entry.shape[0]) if entry.shape else 1
        size = entry.bytes // count * (count if rows is None else rows)
        try:
            if self._file is None or entry.file != self._path or size > self._left:
                self._file, self._left = None, self._most
                self._file, self._path = safe_open(entry.file, framework="pt"), entry.file
            self._left -= size
            if not entry.shape:
                return cast("torch.Tensor", self._file.get_tensor(entry.name))
            return cast("torch.Tensor", self._file.get_slice(entry.name)[before:end])
        except SafetensorError as error:  # which is stricter than a look at the header is
            problem = f"cannot be read: {error}"
            raise InputError(problem, file=entry.file, field=entry.name) from None


def read_tensor(entry: TensorEntry, before: int = 0, rows: int | None = None) -> torch.Tensor:
    """The same of one tensor, whose file is open for it alone.

    Raises:
        InputError: it cannot be read.
    """
    return TensorReader(0).read(entry, before, rows)


def read_index(file: Path) -> Mapping[str, list[str]]:
    """Which tensors stand in which file, from a `model.safetensors.index.json`.

    Raises:
        InputError: the index cannot be read, names a file outside of its folder, or a shard is
            missing.
    """
    try:
        weight_map = read_json(file)["weight_map"]
        files: dict[str, list[str]] = {}
        for name, shard in weight_map.items():
            if Path(shard).name != shard:
                raise InputError("a shard must lie in the same folder", file=file, value=shard)
            files.setdefault(shard, []).append(name)
    except (KeyError, TypeError, AttributeError):
        raise InputError("this is not an index of weights", file=file) from None
    for shard in files:
        if not (file.parent / shard).is_file():
            raise InputError(
                "the index names this shard and it is not there; copy or download it again",
                file=file.parent / shard,
            )
    return files


def find_tensors(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of the folder's one weight file, or of those that its index names.

    Raises:
        InputError: there is no such file, one cannot be read, or the weights are pickled.
    """
    if (folder / WEIGHTS).exists():
        return read_entries(folder / WEIGHTS)
    if not (folder / INDEX).exists():
        pickled = sorted(file for pattern in _PICKLES for file in folder.glob(pattern))
        if pickled:
            raise InputError(
                "pickled weights are not read, as unpickling can run any code; convert the model "
                "to safetensors (`model.save_pretrained(folder)` in transformers) and use that",
                file=pickled[0],
            )
        raise InputError(f"this folder is no model: it has no {WEIGHTS}", file=folder)
    found: dict[str, TensorEntry] = {}
    for shard, names in read_index(folder / INDEX).items():
        entries = read_entries(folder / shard)
        for name in names:
            if name not in entries:
                raise InputError(
                    "the index promises a tensor that the file lacks",
                    file=folder / shard,
                    field=name,
                )
            found[name] = entries[name]
    return found
