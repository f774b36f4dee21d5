"""Model folders as plans read them: shapes alone are enough, so weights may be missing."""

from __future__ import annotations

from pathlib import Path

from modicum.core.errors import InputError
from modicum.models.huggingface import ModelHeader, read_config, read_header, resolve


def has_weights(folder: str | Path) -> bool:
    """Whether a model folder holds weights of any kind, be they such as are read or not.

    Raises:
        InputError: there is no such folder.
    """
    kinds = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.ckpt")
    there = resolve(folder)
    return any(True for kind in kinds for _ in there.glob(kind))


def header_for_plan(folder: str | Path) -> ModelHeader:
    """The header of a model folder; without tensors where it has a config.json and no weights.

    Raises:
        InputError: as `read_header`, where there are weights; else as `read_config`.
    """
    if has_weights(folder):
        return read_header(folder)
    return ModelHeader(resolve(folder), read_config(folder), {})


def check_weights(folder: str | Path) -> None:
    """Refuse a folder that is enough for a plan, and not for training.

    Raises:
        InputError: it has no weights.
    """
    if not has_weights(folder):
        raise InputError(
            "this folder has a config.json and no weights, which is enough for a plan and not for "
            "training; download them (`hf download NAME --local-dir FOLDER`)",
            file=resolve(folder),
            field="model.path",
        )
