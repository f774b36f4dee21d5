"""Adapters as modicum keeps them: a JSON that says which, and their own tensors in safetensors.

Every method can be kept so. Where a method has rewritten a quantized base, the base's tensors are
kept too, since the original weight, which could be rewritten again, is not there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from modicum.adapters.attachment import Attachment
from modicum.adapters.base import Adapter
from modicum.adapters.base_weights import is_exact
from modicum.adapters.copies import parameter_names
from modicum.adapters.names import plain_name
from modicum.adapters.rewriting import rewriting
from modicum.core import files
from modicum.core.contracts.catalog import find
from modicum.core.errors import InputError
from modicum.core.files import publish_folder, write_json
from modicum.core.ranks.sharding import whole

CONFIG, WEIGHTS = "modicum_adapter.json", "adapter.safetensors"
FORMAT = 1  # files without a number have this one too
_BASE = "base:"  # before the names of a base layer's tensors


@dataclass(frozen=True)
class StoredAdapter:
    """What a file says of an adapter; names are those of the plain model.

    Args:
        method: its targets name layers in full.
        state: the adapter's own tensors.
        base: tensors of layers that it has rewritten, where they cannot be made anew.
        prepared: what the method found out about each layer from data.
    """

    method: Adapter
    state: dict[str, Tensor]
    file: Path
    base: dict[str, Tensor] = field(default_factory=dict)
    seed: int = 0
    prepared: dict[str, dict[str, Any]] = field(default_factory=dict)


def taken_as(stored: StoredAdapter, kind: type[Adapter]) -> StoredAdapter:
    """A stored adapter as one of the method `kind`, which is its own or can continue a LoRA.

    Raises:
        InputError: it is of another method.
    """
    if stored.method.info.name == kind.info.name:
        return stored
    if any(stored.prepared.values()):
        raise InputError(
            f"the stored adapter's layers have ranks of their own, and {kind.info.name} has one; "
            "merge it into the model, and train from there",
            file=stored.file,
        )
    found = kind.from_lora(stored.method, stored.state)
    if found is None:
        raise InputError(
            f"the stored adapter is of another method, and {kind.info.name} cannot continue it",
            field="method",
            value=kind.info.name,
            allowed=stored.method.info.name,
        )
    return replace(stored, method=found[0], state=found[1])


def save(
    attached: Attachment,
    folder: Path,
    *,
    base_model: str | None,
    dtype: torch.dtype | None = None,
    write: bool = True,
) -> None:
    """Write the adapter atomically; without `write`, help only.

    Args:
        dtype: of its trained tensors there; None: their own.
    """
    trained = {name for name, _ in attached.named_parameters()}
    tensors = {
        plain_name(key): value if dtype is None or key not in trained else value.to(dtype)
        for key, value in attached.state_dict().items()
    }
    for name, layer in rewriting(attached).items():
        base = attached.model.get_submodule(name)
        if layer.rewrote and not is_exact(base):
            named = {
                plain_name(f"{name}.{key}"): p for key, p in base.named_parameters(recurse=False)
            }
            tensors |= {f"{_BASE}{key}": p for key, p in named.items()}
    gathered = {key: whole(value.detach()).contiguous().cpu() for key, value in tensors.items()}
    if not write:
        return
    targets = [plain_name(name) for name in attached.sites]
    where = {"targets": targets, "exclude": [], "also": list(parameter_names(attached.copied))}
    config = {
        "format": FORMAT,
        "method": attached.method.info.name,
        "fields": attached.method.model_dump() | where,
        "seed": attached.seed,
        "base_model": base_model,
        "prepared": {plain_name(name): dict(s.prepared) for name, s in attached.sites.items()},
    }
    with publish_folder(folder) as temporary:
        save_file(gathered, temporary / WEIGHTS, metadata={"format": "pt"})
        write_json(temporary / CONFIG, config)


def read(folder: Path, plugins: Iterable[str | Path] = ()) -> StoredAdapter:
    """The adapter that a folder of modicum's holds; errors are those of `files.load`."""
    config = read_json(folder / CONFIG)
    if (number := config.get("format", FORMAT)) != FORMAT:
        problem = "this adapter's format is another, as a newer modicum writes it; install that"
        where: Any = {"file": folder / CONFIG, "field": "format", "value": number}
        raise InputError(problem, allowed=str(FORMAT), **where)
    tensors = read_tensors(folder / WEIGHTS)
    value = described(config, plugins, folder / CONFIG)
    try:
        seed = int(config["seed"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"does not describe an adapter: {error!r}", file=folder / CONFIG) from None
    base = {key.removeprefix(_BASE): t for key, t in tensors.items() if key.startswith(_BASE)}
    state = {key: t for key, t in tensors.items() if not key.startswith(_BASE)}
    prepared = config.get("prepared", {})
    if not isinstance(prepared, dict) or not all(isinstance(v, dict) for v in prepared.values()):
        raise InputError("must map layers to objects", file=folder / CONFIG, field="prepared")
    return StoredAdapter(value, state, folder / WEIGHTS, base, seed, prepared)


def described(config: Mapping[str, Any], plugins: Iterable[str | Path], file: Path) -> Adapter:
    """The value that a description names: a method and its fields.

    Raises:
        InputError: there is no such method, or it has no such fields.
    """
    name = config.get("method")
    if not isinstance(name, str):
        raise InputError("must be a method's name", file=file, field="method", value=name)
    try:
        value = find(name, plugins, room="adapters").load()(**config["fields"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"does not describe an adapter: {error!r}", file=file) from None
    except InputError as error:
        raise error.located(file=file) from None
    assert isinstance(value, Adapter)
    return value


def base_model_of(folder: str | Path) -> str | None:
    """What a folder with an adapter, in either format, says of the model that it is for.

    Raises:
        InputError: there is no adapter in the folder.
    """
    path = Path(folder)
    own = (path / CONFIG).exists()
    config = read_json(path / (CONFIG if own else "adapter_config.json"))
    found = config.get("base_model" if own else "base_model_name_or_path")
    return None if found is None else str(found)


def base_folder_of(folder: str | Path) -> Path:
    """The folder of the model that an adapter in a folder, in either format, is for.

    Raises:
        InputError: there is no adapter, it names no model, or what it names is no folder here.
    """
    path, base = Path(folder), base_model_of(folder)
    if not base:
        field = "base_model" if (path / CONFIG).exists() else "base_model_name_or_path"
        problem = "the adapter does not say which model it is for; write that model's folder here"
        raise InputError(problem, file=path, field=field)
    if not Path(base).is_dir():
        problem = "the adapter's base model is not there any more"
        raise InputError(problem, file=path, value=base)
    return Path(base)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of an adapter's folder.

    Raises:
        InputError: it is missing, cannot be read, or is no JSON object.
    """
    if not os.path.lexists(path):
        if not path.parent.is_dir():
            raise InputError("there is no such folder", file=path.parent)
        raise InputError(f"not an adapter: no {path.name} in this folder", file=path.parent)
    content = files.read_json(path)
    if not isinstance(content, dict):
        raise InputError("this is no JSON object", file=path)
    return content


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of an adapter's folder.

    Raises:
        InputError: the file is missing or cannot be read.
    """
    if not os.path.lexists(path):
        raise InputError("the adapter's weights are missing", file=path)
    if not path.is_file():
        raise InputError("this is no regular file", file=path)
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(f"cannot be read: {error}", file=path) from None
