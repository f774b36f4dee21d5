"""Adapters in the files of a full model, next to its weights: as `save_pretrained` leaves them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from modicum.adapters.adapter_layer import COPY, decoded
from modicum.adapters.names import plain_name
from modicum.adapters.native_files import StoredAdapter, described
from modicum.core.errors import InputError

_OF_LAYER = re.compile(r"^(.+)\.layers_by_adapter\.([^.]+)\.([^.]+)$")
_SHARED = re.compile(r"^shared_by_([^.]+)\.([^.]+)$")


def files_of(folder: Path) -> list[Path]:
    """The safetensors files of a model's folder that hold tensors of adapters."""
    return [file for file in sorted(folder.glob("model*.safetensors")) if _read(file)]


def read(folder: Path, name: str, plugins: Iterable[str | Path] = ()) -> StoredAdapter:
    """The adapter `name` that a model's own files hold; errors are those of `files.load`."""
    state: dict[str, Tensor] = {}
    there, sites, also, description = set(), list[str](), list[str](), None
    prepared: dict[str, dict[str, Any]] = {}
    for file in files_of(folder):
        for (owner, site, key), tensor in _read(file, name).items():
            there.add(owner)
            if tensor is None:
                continue
            if key == "_extra_state":
                description = decoded(tensor)
                if description.pop("kind", None) is None:
                    sites.append(site)
                    prepared[site] = description.pop("prepared", {})
            else:
                state[f"{site}.{key}"] = tensor
                if key.startswith(COPY):
                    also.append(f"{site}.{key.removeprefix(COPY)}")
    if description is None:
        raise InputError(
            "the model's files hold no adapter of this name",
            file=folder,
            value=name,
            allowed=", ".join(sorted(there)),
            candidates=there,
        )
    if description.get("merged"):
        raise InputError(
            "this adapter is folded into the weights of the model's files already, so it would "
            "count twice; use the model as it is",
            file=folder,
            value=name,
        )
    value = described(description, plugins, folder)
    value = value.with_fields(targets=tuple(sites), also=tuple(also))
    return StoredAdapter(value, state, folder, prepared=prepared)


def _read(file: Path, name: str | None = None) -> dict[tuple[str, str, str], Tensor | None]:
    """By (adapter, site, key) what a file holds of adapters; the tensors of `name` alone.

    Raises:
        InputError: the file cannot be read.
    """
    found: dict[tuple[str, str, str], Tensor | None] = {}
    try:
        with safe_open(file, framework="pt") as handle:
            for full in handle.keys():  # noqa: SIM118 - it is no dictionary
                plain = plain_name(full)
                if match := _OF_LAYER.match(plain):
                    site, owner, key = match.groups()
                elif match := _SHARED.match(plain):
                    (owner, key), site = match.groups(), "shared"
                else:
                    continue
                found[owner, site, key] = handle.get_tensor(full) if owner == name else None
    except (SafetensorError, OSError) as error:
        raise InputError(f"cannot be read: {error}", file=file) from None
    return found
