"""What a model folder says of its weights without loading them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from modicum.core.errors import InputError
from modicum.core.files import read_json
from modicum.models.huggingface import CONFIG
from modicum.models.safetensors_file import read_entries

_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}


def stored_dtype(folder: Path) -> str | None:
    """The type that most of the weights are stored in (F32, BF16...), or config.json names.

    Raises:
        InputError: a file of weights cannot be read.
    """
    counted: Counter[str] = Counter()
    for file in folder.glob("*.safetensors"):
        for entry in read_entries(file).values():
            counted[entry.dtype] += entry.bytes
    if counted:
        return counted.most_common(1)[0][0]
    try:
        raw = read_json(folder / CONFIG)
    except InputError:
        return None
    named = raw.get("dtype", raw.get("torch_dtype")) if isinstance(raw, dict) else None
    return _NAMES.get(str(named).removeprefix("torch."))
